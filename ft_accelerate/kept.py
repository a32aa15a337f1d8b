"""What keeps an Accelerator alive while its run is in the job, and no longer.

How it works. The Manager's threads keep the Manager, which keeps the functions that collect and load state, which
keep a `Kept`, which keeps the Accelerator until the run ends. So a run does not vanish, by Python's collector, from a
job that it never left, on one rank earlier than on another; and what has ended sits in no reference cycle.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Kept:
    """An Accelerator, while there is an `owner`."""

    def __init__(self) -> None:
        self.owner: object = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the Manager calls."""
        return function(*arguments)
