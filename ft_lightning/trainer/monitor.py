"""`FaultToleranceMonitor`: the job's health as metrics, in whatever logger is in use and in the progress bar.

How it works. After every batch it looks at the quorum and at what became of the step, and logs through Lightning's own
`log`, so `log_every_n_steps`, loggers and the progress bar treat its numbers as they treat a loss:

    ft/members      replica groups in the quorum (in the progress bar as `members`)
    ft/vetoed       optimizer steps that were not committed since the job began (there may be several in a batch)
    ft/heals        times that a replica received the others' state
    ft/gap_s        the last interruption: seconds between the two commits around a veto or a change of members
    ft/longest_gap_s

The counts are the leader's; they are part of the callback's state, so they survive it and a resumed job goes on with
them. Each number costs one `log` call per batch.

Threads: the training thread.
"""

from __future__ import annotations

import time
from typing import Any

from ft_lightning import _compat

COUNTS = ("vetoed", "heals", "gap_s", "longest_gap_s")


class Monitor:
    """The monitor's part of the callback; `monitor_class` mixes the two for one of the two class trees.

    Args:
        prog_bar: show the number of members in the progress bar.
        prefix: of the metrics' names.
    """

    def __init__(self, prog_bar: bool = True, prefix: str = "ft/") -> None:
        super().__init__()
        self.prog_bar = prog_bar
        self.prefix = prefix
        self.members = 0
        """Replica groups in the quorum of the last batch."""
        self.vetoed = 0
        """Optimizer steps that were not committed."""
        self.heals = 0
        """Received states, those at the start excepted."""
        self.gap_s = 0.0
        """Length of the last interruption."""
        self.longest_gap_s = 0.0
        self._quorum_id = 0
        self._first_step = 0
        self._committed_at = 0.0
        self._disturbed = False
        """There was a veto or a change of members since the last commit."""
        self._step = 0
        self._seen = 0
        """The strategy's `vetoed_steps` at the last look; they begin at 0 in every `fit` of every replica."""
        self._clock = time.monotonic

    def __repr__(self) -> str:
        return f"FaultToleranceMonitor({self.members} members, {self.vetoed} vetoed, {self.heals} heals)"

    def state_dict(self) -> dict[str, Any]:
        """The counts, as they are saved in a checkpoint."""
        return {name: getattr(self, name) for name in COUNTS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the others' counts."""
        for name in COUNTS:
            setattr(self, name, state_dict.get(name, getattr(self, name)))
        self._disturbed = False
        self._committed_at = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The interval before the first step is no gap."""
        del pl_module
        self._committed_at, self._disturbed, self._step = 0.0, False, trainer.global_step
        self._first_step = getattr(trainer.strategy, "first_step", 0)
        self._seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log what has changed since the batch before."""
        del pl_module
        manager = getattr(trainer.strategy, "manager", None)
        if manager is None:
            return
        known, self._seen = self._seen, trainer.strategy.vetoed_steps
        self._look(manager, self._seen - known, trainer.global_step)
        name = self.prefix
        log: Any = self.log  # type: ignore[attr-defined]
        for key in COUNTS:
            log(name + key, float(getattr(self, key)), on_step=True, batch_size=1)
        log(name + "members", float(self.members), on_step=True, batch_size=1)
        if self.prog_bar:
            log("members", float(self.members), on_step=True, prog_bar=True, logger=False, batch_size=1)

    def _look(self, manager: Any, vetoed: int, step: int) -> None:
        if manager.quorum_id != self._quorum_id:
            if manager.current_step() > self._first_step + 1:  # at the start all take the state of one
                self.heals += len(manager.healing_members)
            self._disturbed = self._quorum_id > 0
            self._quorum_id = manager.quorum_id
        self.members = len(manager.members)
        if vetoed:
            self.vetoed += vetoed
            self._disturbed = True
        elif step != self._step:
            now = self._clock()
            if self._disturbed and self._committed_at:
                self.gap_s = now - self._committed_at
                self.longest_gap_s = max(self.longest_gap_s, self.gap_s)
            self._disturbed, self._committed_at = False, now
        self._step = step


_classes: dict[str, type[Any]] = {}


def monitor_class(tree: str | None = None) -> type[Any]:
    """FaultToleranceMonitor for `lightning.pytorch` or `pytorch_lightning`; None: for the one that is imported."""
    tree = tree or _compat.imported(_compat.TREES)
    if tree not in _classes:
        base = _compat.part(tree, "callbacks.Callback")
        _classes[tree] = type("FaultToleranceMonitor", (Monitor, base), {
            "__doc__": Monitor.__doc__, "__module__": "ft_lightning",
        })  # fmt: skip
    return _classes[tree]
