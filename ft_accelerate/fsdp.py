"""`ShardedPreparation`: models that each replica group shards with FSDP2, as Accelerate does.

How it works. `_prepare_fsdp2` shards the model over the processes of this group; what it returns is given to the run
(`run.prepare_sharded`), which averages each process's shards with those of its like in the other groups. The module is
not wrapped: a script has the one that Accelerate returns.

Preparing, saving and loading are collectives of the group, in which Accelerate asks for the main process and means the
group's first one (`within_group`). torch makes the state of an optimizer there by a step with zero gradients, which is
no training step: it is made without a vote.

Accelerate itself does not shard on a machine without accelerators. `shard_on_cpus` switches that on, so that a script
can be tried, and tested, there.

Threads: the training thread.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from ft_accelerate import _compat
from ft_accelerate.optimizer import VotedOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ft_accelerate.run import Run

log = logging.getLogger("ft_accelerate")
Base: Any = object


def plugin_in_force(given: Mapping[str, Any]) -> Any:
    """The FullyShardedDataParallelPlugin that an Accelerator will use; None: no FSDP.

    Args:
        given: its arguments by name.
    """
    plugin = given.get("fsdp_plugin")
    if plugin is None and _compat.flag("ACCELERATE_USE_FSDP"):
        plugin = _compat.FullyShardedDataParallelPlugin()
    return plugin


def shard_on_cpus(accelerator: Any, plugin: Any) -> None:
    """Switch FSDP on where Accelerate leaves it off: in a group of several CPU processes.

    Args:
        accelerator: that was just built.
        plugin: `plugin_in_force`.
    """
    kind = accelerator.state.distributed_type
    if plugin is None or kind == _compat.DistributedType.FSDP:
        return
    if kind == _compat.DistributedType.MULTI_CPU and not torch.accelerator.is_available():
        _compat.switch_fsdp_on(accelerator.state, plugin)
        _compat.scale_losses_on_cpus(accelerator)
        return
    why = "one process" if kind == _compat.DistributedType.NO else f"distributed_type={getattr(kind, 'value', kind)}"
    log.warning(
        "fsdp_version=2, and a replica group of %s: Accelerate shards nothing there, so each process holds the whole "
        "model", why,
    )  # fmt: skip


class ShardedPreparation(Base):  # type: ignore[misc]
    """The part of the Accelerator that knows FSDP2; mixed in, in front of Accelerate's."""

    _optimizers: list[Any]
    _within = 0
    """How many `within_group` are open."""

    if TYPE_CHECKING:
        _run: Run | None

    @contextlib.contextmanager
    def within_group(self) -> Iterator[None]:
        """Inside, the main process is the first one of this group, and optimizers step without a vote."""
        optimizers = [one for one in self._optimizers if isinstance(one, VotedOptimizer)]
        self._within += 1
        for optimizer in optimizers:
            optimizer.makes_state = True
        try:
            yield
        finally:
            self._within -= 1
            for optimizer in optimizers:
                optimizer.makes_state = self._within > 0

    def _prepare_fsdp2(self, *args: Any) -> Any:
        with self.within_group():
            prepared = super()._prepare_fsdp2(*args)
        if self._run is not None:
            for item in prepared:
                if isinstance(item, torch.nn.Module):
                    self._run.prepare_sharded(item)
        return prepared
