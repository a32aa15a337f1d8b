"""`Kept`: an Accelerator lives while its run is in the job, and no longer.

How it works. The Manager's threads keep the Manager, which keeps the functions that collect and load state, which
keep a `Kept`, which keeps the Accelerator until the run ends. So a run does not vanish, by Python's collector, from a
job that it never left, on one rank earlier than on another; and what has ended sits in no reference cycle.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable


class Kept:
    """Keeps an Accelerator, while that is its `owner`."""

    def __init__(self) -> None:
        self.owner: object = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it; the Manager holds this method, and with it the owner."""
        return function(*arguments)


def weakly(owner: weakref.ref[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(owner, ...)`, which keeps no owner alive: what is called when it is gone has nothing to do any more."""

    def call(*arguments: Any) -> Any:
        alive = owner()
        return None if alive is None else function(alive, *arguments)

    return call
