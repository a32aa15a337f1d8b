"""`GroupUnevenEnd`: a replica's training data ends before the others': `on_exhausted` and `join_uneven_inputs`.

How it works. It is the kit's `UnevenEnd` for loaders. What a step does is known to the script's loop alone (clipping,
several schedulers, averages of its own), so nothing is applied here: a replica without data trails, and is healed by
the others before the epoch ends, with everything that `healed_state` knows.

Prepared loaders call `run_out` at the end of their loops; for a loader of the script's own the context of
`join_uneven_inputs` does. The processes of a group end together, with the first of them: prepared loaders ask each
other after each batch that they read ahead (`ends`).

Invariant: positions of replicas in one epoch are compared by their batches, also where their numbers of batches differ.
Threads: the training thread.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ft_accelerate import _compat
from ft_core.errors import ConfigError
from ft_core.loop.uneven import UnevenEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core import Manager
    from ft_core.loop.position import Position
    from ft_core.loop.window import StepWindow


class GroupUnevenEnd(UnevenEnd):
    """The end of this replica's data, epoch by epoch, in one run after the other.

    Args:
        window: whose attempts this replica takes part in.
        policy: `on_exhausted`; None: nothing of this.
        leave_others: ends the run of this replica, while the others go on; called with the reason.
    """

    def __init__(self, window: StepWindow, policy: str | None, leave_others: Callable[[str], None]) -> None:
        super().__init__(window, leave_others)
        self._given = policy
        window.on_unread, window.on_vote = self._unread, self._voted
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the last run: another one begins."""
        self.begin(self._given)
        self.joined = False
        """In the context of join_uneven_inputs: loaders that were not prepared count, and the policy is "shadow"."""
        self.optimizers = 1
        """How many optimizers were prepared."""

    def check(self) -> None:
        """Refuse what does not go with a policy.

        Raises:
            ConfigError: several models, or several optimizers.
        """
        for count, what in ((len(self._window.models), "models"), (self.optimizers, "optimizers")):
            if count > 1:
                raise ConfigError(
                    f"on_exhausted={self.policy!r} (or join_uneven_inputs) with {count} prepared {what}: who is out of "
                    "data cannot know which of them the others' next step is of; prepare one model and one optimizer, "
                    "or let all replicas have equally many batches (even_batches=True, elastic_data=True)"
                )

    def loop_begins(self) -> None:
        """A prepared loader is read for training.

        Raises:
            ConfigError: as `check`.
        """
        self.over = False
        if self.policy is not None:
            self.check()

    def _unread(self) -> None:
        """A window opens in a forward, outside of the loops over prepared loaders.

        Raises:
            ConfigError: in the context, in a group of several processes: they have to end together.
        """
        if self.joined and self._window.ranks > 1:
            raise ConfigError(
                f"join_uneven_inputs with {self._window.ranks} processes per replica group around a data loader that "
                "was not prepared: the processes of a group have to end together, and only a prepared loader asks the "
                "others; prepare it"
            )

    def _voted(self, _: Manager, __: bool) -> None:
        self.voted()

    def ends(self, here: bool) -> bool:
        """Whether the data ends for this group: with it `here`, or on another of its processes."""
        if self.policy is None or self._window.ranks == 1:
            return here
        return self._window.inside.any(here, self._window.device)

    def run_out(self, position: Position | None = None) -> None:
        """As the kit's, if there is a policy, with gradients that were accumulated dropped. Raises ConfigError, too."""
        window = self._window
        if self.policy is None or window.manager is None or window.stopped or window.ended:
            return
        self.check()
        window.close()
        window.drop_gradients()
        super().run_out(position)
        window.drop_gradients()
        if self.policy == "leave":
            window.stopped = True


@contextlib.contextmanager
def joined(
    accelerator: Any, out: GroupUnevenEnd, joinables: Any, even_batches: bool | None, elastic: Callable[[], bool]
) -> Iterator[None]:
    """Train inside on loaders of different lengths (`join_uneven_inputs`).

    Args:
        accelerator: whose loaders are read inside.
        out: of this accelerator's run.
        joinables: the model, and perhaps the optimizer.
        even_batches: of loaders inside; None: as the accelerator says.
        elastic: whether the data that is trained on is elastic: it ends everywhere at once.

    Raises:
        ConfigError: other joinables, or what `UnevenEnd.check` refuses.
    """
    window, before, policy = out._window, accelerator.even_batches, out.policy
    models = [one for model in window.models for one in (model, *(model.roots if model.sharded else ()))]
    ours = [*models, *accelerator._optimizers, *(optimizer.optimizer for optimizer in accelerator._optimizers)]
    for item in joinables:
        if not any(item is mine for mine in ours):
            raise ConfigError(
                f"join_uneven_inputs([{type(item).__name__}]): not a model or an optimizer that this Accelerator has "
                "prepared for training; pass what prepare() returned"
            )
    even = before if even_batches is None else even_batches
    _make_even(accelerator, even)
    if not even:
        out.policy, out.done, out.joined = "shadow", False, True
        out.check()
    try:
        yield
        if not even and not out.done and window.training and not elastic():
            out.run_out(None)
            accelerator.step = 0  # what was accumulated is dropped, here and elsewhere
    finally:
        _make_even(accelerator, before)
        out.policy, out.joined = policy, False


def _make_even(accelerator: Any, even: bool) -> None:
    """All processes get equally many batches of the prepared loaders, or not, from their next epoch on."""
    accelerator.even_batches = even
    for loader in accelerator._dataloaders:
        for base in getattr(loader, "_bases", [loader]):
            shard = _compat.shard_of(base)
            if hasattr(shard, "even_batches"):
                shard.even_batches = even
