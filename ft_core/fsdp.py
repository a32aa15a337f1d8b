"""FSDP2 inside a replica group, replicas across the groups: `replicate(manager, model)` after torch's `fully_shard`.

How it works. Each replica group holds one sharded copy of the model: `fully_shard` (and tensor parallelism) over the
processes of the group, as in any script. `replicate` averages what FSDP2 has reduced inside the group over the groups:
each rank's shards with those of the same rank of the others, in buckets, while backward goes on, and the commit vote
rides on the last bucket, as with DistributedDataParallel. Together it is torch's HSDP, and bit for bit equal to it
where both can be compared.

    mesh = init_device_mesh("cpu", (world_size,))      # of this group's processes
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    replicate(manager, model)                          # the line that is new
    optimizer = OptimizerWrapper(manager, torch.optim.AdamW(model.parameters()))

Gradient accumulation is said as for torch's HSDP: `set_requires_gradient_sync(False)` keeps whole gradients,
`set_requires_all_reduce(False)` reduce-scatters each micro-batch and crosses to the other groups with the last one.

Invariant: the parameters are those that were there when `replicate` was called. Threads: the training thread.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.utils._pytree import tree_leaves

from ft_core.errors import ConfigError, UsageError
from ft_core.reduction.batch_weights import unweigh_inputs, weigh_outputs
from ft_core.reduction.bucket_plan import BucketSettings
from ft_core.reduction.sharded.fsdp_groups import groups_of
from ft_core.reduction.sharded.inventory import take_shards
from ft_core.reduction.sharded.reducer import ShardReducer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

    from ft_core.reduction.interface import ShardManager

__all__ = ["Replicated", "replicate"]

MIB = 1 << 20
DEFAULT_BUCKET_CAP_MB = 4.0
"""Of shards, which are small: a bucket as large as DDP's would seldom be launched before backward ends."""


def replicate(manager: ShardManager, *modules: nn.Module, bucket_cap_mb: float | None = None) -> Replicated:
    """Average the gradients of sharded modules over the replica groups, from the next backward on.

    Call it on every rank, after `fully_shard` and after the parameters are materialized (`to_empty`, a checkpoint
    loaded with `assign=True`), before the first `start_quorum`.

    Args:
        manager: of this rank; its `world_size` is that of the group.
        modules: the roots, each a module on which `fully_shard` was called last; together they are one model.
        bucket_cap_mb: MiB of local shards per bucket; None: 4.

    Returns:
        What undoes it (`unwrap`). The modules themselves are trained as before.

    Raises:
        ConfigError: a module is not sharded; a trained parameter is whole, on the meta device, or sharded over other
            processes than those of the group; `bucket_cap_mb` is not more than 0.
    """
    return Replicated(manager, modules, shard_settings(modules, bucket_cap_mb))


def shard_settings(modules: tuple[nn.Module, ...], bucket_cap_mb: float | None) -> BucketSettings:
    """The settings of the buckets, for modules that are not replicated yet. Raises ConfigError, as `replicate`."""
    if not modules:
        raise ConfigError("replicate: pass the sharded model")
    given: object = bucket_cap_mb
    cap = DEFAULT_BUCKET_CAP_MB if given is None else given
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < float("inf"):
        raise ConfigError(f"replicate(bucket_cap_mb={bucket_cap_mb!r}): it must be a number of MiB, more than 0")
    for module in modules:
        if module in _replicated:
            raise ConfigError(f"replicate({type(module).__name__}): it is replicated already; unwrap() that first")
    return BucketSettings((int(cap * MIB),), find_unused=True)


SKIPS_HOOKS = "compiled_autograd" in inspect.getsource(_fsdp_collectives)
"""Older versions of torch run no post-accumulate hooks of sharded parameters under compiled autograd."""


def _compiles_autograd() -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    return bool(dynamo.config.compiled_autograd or dynamo.compiled_autograd.compiled_autograd_enabled)


_replicated: WeakSet[nn.Module] = WeakSet()
"""Roots, while they are replicated."""


class Replicated:
    """Sharded modules whose gradients are averaged over the replica groups. Made by `replicate`."""

    def __init__(self, manager: ShardManager, modules: tuple[nn.Module, ...], settings: BucketSettings) -> None:
        hooks = manager.hooks
        shards = take_shards(modules, settings, hooks.ranks)
        self.modules = modules
        self._manager = manager
        self._held = _held(modules, [shard.parameter for shard in shards.trained])
        self._frozen = [
            (name, parameter) for root in modules for name, parameter in root.named_parameters()
            if not parameter.requires_grad
        ]  # fmt: skip
        self._reducer = ShardReducer(hooks, modules, shards, self._unannounced)
        try:
            hooks.register_reducer(self._reducer)
        except BaseException:
            self._reducer.remove_hooks()
            raise
        self._handles: list[RemovableHandle] = []
        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._after_forward),
            ]
            _replicated.add(module)

    def __repr__(self) -> str:
        names = ", ".join(type(module).__name__ for module in self.modules)
        return f"Replicated({names}: {self._reducer!r})"

    @property
    def gradient_reducer(self) -> ShardReducer:
        """What is registered with the Manager."""
        return self._reducer

    def unwrap(self) -> None:
        """Undo it: gradients stay inside the group. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if any(module in _replicated for module in self.modules):
            self._reducer.remove_hooks()
            self._manager.hooks.unregister_reducer(self._reducer)
        for module in self.modules:
            _replicated.discard(module)

    def _before_forward(
        self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        reducer = self._reducer
        if not torch.is_grad_enabled():
            reducer.buffers.put_back()
            return None
        self._check()
        reducer.before_forward(sync=self._crosses())
        ratio = reducer.batch_ratio
        return None if ratio == 1.0 or module is not self.modules[0] else unweigh_inputs((inputs, kwargs), ratio)

    def _crosses(self) -> bool:
        """Whether the gradients of the backward that follows are averaged over the groups; before each forward."""
        return True

    def _unannounced(self) -> bool:
        """The same in a backward after another method than `forward` (`register_fsdp_forward_method`)."""
        self._check()
        return True

    def _after_forward(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
        reducer = self._reducer
        if not torch.is_grad_enabled():
            return None
        ratio = reducer.batch_ratio
        if ratio != 1.0 and module is self.modules[-1]:
            output = weigh_outputs(output, ratio)
        if reducer.watches_outputs:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    reducer.watch_output(leaf)
        return output

    def _check(self) -> None:
        """Refuse parameters whose gradients nobody would average: replaced ones, and such as were frozen before."""
        if SKIPS_HOOKS and _compiles_autograd():
            raise UsageError(
                "torch._dynamo.config.compiled_autograd: this version of torch skips the hooks of sharded parameters "
                "then, so no gradient would reach the other groups: switch it off, or use torch 2.13"
            )
        for held, mine, name in self._held:
            there = held._module_info.module._parameters.get(held._module_info.param_name)
            if held.sharded_param is not mine or (held.sharded_state is ShardedState.SHARDED and there is not mine):
                raise UsageError(
                    f"parameter {name} was replaced after replicate(), as load_state_dict(assign=True) does: its "
                    "gradient would stay inside the group. Load with assign=False, or call replicate after it"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"requires_grad of {name} was False at replicate(), and is True now: its gradient would stay "
                    "inside the group. Unfreeze it before fully_shard and replicate, on all ranks of all groups; to "
                    "train it later only, give it a learning rate of 0 until then"
                )


def _held(modules: tuple[nn.Module, ...], trained: Sequence[nn.Parameter]) -> list[tuple[Any, nn.Parameter, str]]:
    """FSDP2's record of each trained parameter: where it looks for the one that is there now; and its name."""
    mine = {id(parameter): parameter for parameter in trained}
    found = []
    for root in modules:
        for module in root.modules():
            groups = groups_of(module)
            found += [
                (held, mine[id(held.sharded_param)], held._param_fqn or held._module_info.param_name)
                for group in groups for held in group.fsdp_params if id(held.sharded_param) in mine
            ]  # fmt: skip
    return found
