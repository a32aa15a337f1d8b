"""Checkpoints carry the Manager's state; `fit(ckpt_path=...)` resumes the whole job with it.

How it works. `save` adds the Manager's step and lineage to the checkpoint under `KEY` (plain Lightning ignores it);
`load` keeps it until the Manager exists, `into` gives it to the Manager before the first quorum. A plain Lightning
checkpoint has none: then the Manager stands at its `global_step`. Replicas that loaded the same file agree at once;
otherwise the newest state wins, and the others receive it.

Without shared storage the file is on the machine of the replica that wrote it. A replica that does not find it starts
without, and receives the state of one that did. If nobody found it, `check` says so, instead of training from scratch.

Threads: the training thread.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any

from ft_core.errors import ConfigError
from ft_lightning._compat import writers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core import Manager

log = logging.getLogger("ft_lightning")
KEY = "ft_manager"


class Resume:
    """The checkpoint that `fit` starts from, as far as one strategy knows it."""

    def __init__(self) -> None:
        self._path = ""
        self._state: dict[str, int] | None = None

    def __repr__(self) -> str:
        return f"Resume({self._path or 'nothing'}, {self._state})"

    @property
    def given(self) -> bool:
        """`fit` is to start from a checkpoint, whether it is here or not."""
        return bool(self._path)

    def reset(self) -> None:
        """Forget the checkpoint: another run begins."""
        self._path, self._state = "", None

    @staticmethod
    def save(checkpoint: dict[str, Any], manager: Manager | None) -> None:
        """Add the Manager's state to a checkpoint."""
        if manager is not None:
            checkpoint[KEY] = manager.state_dict()

    def load(self, tree: str, path: object, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Read the checkpoint, and keep the Manager's part; for Strategy.load_checkpoint in `fit`."""
        self._path = str(path)
        try:
            checkpoint = read()
        except FileNotFoundError:
            log.warning(
                "ckpt_path=%s is not on %s: this replica starts without it and takes the state of one that has it",
                path, socket.gethostname(),
            )  # fmt: skip
            return writers.no_checkpoint(tree)
        step = int(checkpoint.get("global_step", 0))
        self._state = dict(checkpoint.get(KEY) or {"step": step, "batches_committed": step})
        return checkpoint

    def into(self, manager: Manager) -> None:
        """Put the Manager where the checkpoint was saved."""
        if self._state is not None:
            manager.load_state_dict(self._state)
            step, host = self._state["step"], socket.gethostname()
            log.info("%s on %s found step %d in %s", manager.replica_id, host, step, self._path)

    def check(self, manager: Manager) -> None:
        """Refuse to train from scratch where a checkpoint was named; after the first `start_quorum`.

        Raises:
            ConfigError: no member of the quorum has found the checkpoint.
        """
        path, self._path = self._path, ""
        if path and self._state is None and manager.current_step() == 0:
            raise ConfigError(
                f"ckpt_path={path!r} was found by no replica of {', '.join(manager.members)}: put it where at least "
                "one of them can read it, or leave ckpt_path out to train from scratch"
            )
