"""The contract between the Manager and elastic data: what a sampler needs of it, and what it reports to a sampler.

How a step goes. The sampler calls `start_quorum`, waits for the quorum (in the steady state there is nothing to wait
for), and reads how many take part and at which place it stands: with the cursor, that fixes the step's samples. The
training loop trains and votes. Inside should_commit, right after the verdict has been settled and before anything may
collect state again, the Manager calls exactly one of `committed` and `vetoed`.

Invariants the Manager keeps for an attached sampler:
- `start_quorum` called again before the vote (by an optimizer wrapper's `zero_grad`, by a strategy) does nothing: the
  samples are divided for the attempt that is open. What goes wrong in between is spent at the vote.
- `participating_rank` and `num_participants` do not change between start_quorum and the vote.
- State that is loaded in should_commit is loaded before `committed`.
- Every contributor of an attempt has set a weight, so that none counts as one gradient beside others' samples.

Threads: the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class DataHooks(Protocol):
    """What a sampler needs of `Manager.hooks`."""

    def attach_data(self, listener: DataListener) -> None:
        """Announce the sampler, before the first start_quorum. Raises UsageError later, ConfigError for a second."""
        ...

    def weigh(self, weight: int) -> None:
        """Samples in the micro-batch that comes next; added up over the micro-batches of an attempt."""
        ...


class DataManager(Protocol):
    """What a sampler needs of the Manager."""

    @property
    def hooks(self) -> DataHooks:
        """Where it announces itself, and its weights."""
        ...

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """The cursor heals with everything else."""
        ...

    def start_quorum(self) -> None:
        """Open the next attempt."""
        ...

    def num_participants(self) -> int:
        """Replica groups whose gradients are to count in this attempt. Waits for the quorum."""
        ...

    def participating_rank(self) -> int | None:
        """This group's place among them, or None. Waits for the quorum."""
        ...


class DataListener(Protocol):
    """The Manager's reports about its steps."""

    def committed(self, contributed: Collection[int] | None) -> None:
        """This replica holds the next version.

        Args:
            contributed: places among the participants, as in `participating_rank`, whose share of the step is in the
                sum (a share may be empty); None: all. The same on all replicas that hold the next version.
        """
        ...

    def vetoed(self) -> None:
        """The attempt ended and this replica's version is what it was."""
        ...

    def describe(self) -> str:
        """One line that has to be equal on all replicas: compared before a quorum is formed (as the layout is)."""
        ...
