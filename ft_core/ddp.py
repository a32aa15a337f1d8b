"""DistributedDataParallel for replicas that may fail, and its simple sibling.

`DistributedDataParallel` looks like torch's class (isinstance, `module.` keys, `no_sync`, arguments) and shares its
rounding, but not its machinery: torch's C++ reducer is never built, since it needs a process group that cannot change,
synchronizes in its constructor, and orders buckets by the arrival of gradients, which differs on a newcomer. A
`BucketReducer` (`bucket_reducer`) does the work; this file checks arguments, collects what is to be reduced, and makes
the attributes that torch's DDP and its users expect exist.

What differs from torch's DDP, on purpose:
- Gradients are always views of the buckets (torch's `gradient_as_bucket_view=True`).
- A parameter may be without a gradient in a backward, as with torch's `find_unused_parameters=True`, but no graph is
  walked: how many participants used each parameter is summed in the last bucket's tail. The gradient is None if
  nobody did, so that weight decay and momentum leave the parameter alone. `find_unused_parameters=False`, given, says
  that all parameters are used: nothing is counted, and what is unused all the same gets zeros and a log line.
- Buffers are not broadcast before forward. They follow the first participant at each commit and are restored on a veto;
  where a graph may need them (a GAN's generator during its discriminator's step), the module has others till its next
  forward, which have the values of the verdict.
- After a failed collective, `backward()` returns normally, gradients are garbage, and the step will be vetoed.
- Every backward after a synchronizing forward is reduced, where torch's reduces only the first one.
- Sums of three or more replicas may differ from torch's in the last bit: Gloo's order of summation depends on where an
  element lies in its bucket. With two they are equal. All replicas always agree bit for bit.

Invariant: a copy (deepcopy, pickle) is inert: it runs forward, has no hooks, and refuses to train.
Threads: none here; see `bucket_reducer`.
"""

# ruff: noqa: ARG002 (arguments of overridden methods keep torch's names)

from __future__ import annotations

import functools
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from ft_core.errors import ConfigError, NotAvailableError, UsageError
from ft_core.join import JoinMember, joining_of, notify
from ft_core.reduction.autograd import NO_GRAPH_TASK, graph_task_id, queue_callback
from ft_core.reduction.batch_weights import unweigh_inputs, weigh_outputs
from ft_core.reduction.bucket_reducer import BucketReducer
from ft_core.reduction.ddp_arguments import (
    DEFAULT_CAPS_BYTES,
    IMPOSSIBLE,
    MIB,
    Inventory,
    Options,
    check_arguments,
    check_devices,
    take_inventory,
)
from ft_core.reduction.parameter_watch import ParameterWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ft_core.reduction.interface import AllreduceHost, PendingWork, ReducerHost, ReducerManager

__all__ = ["DistributedDataParallel", "PureDistributedDataParallel"]


@functools.cache
def _leave_forward_untraced() -> None:
    """Let torch.compile skip the wrapper's own frame, as it does with torch's DDP, and compile the module inside.

    Not a decorator, because the call imports torch's compiler, which takes a second.
    """
    torch.compiler.disable(DistributedDataParallel.forward, recursive=False)


class DistributedDataParallel(JoinMember, TorchDistributedDataParallel):
    """Averages gradients over the participants of each step while backward runs; survives their failure.

    Args:
        manager: the Manager whose steps these gradients belong to. `start_quorum` must run before `backward`. None: the
            wrapper is inert, as a copy is.
        module: the module; its parameters decide the bucket plan, so they may not be frozen, unfrozen, cast or replaced
            afterwards, and none may be added (`unwrap()` and wrap again). With `find_unused_parameters=True` they may
            be frozen, for any time.
        kwargs: torch's arguments. Honoured: device_ids, output_device, bucket_cap_mb, bucket_cap_mb_list,
            broadcast_buffers / forward_sync_buffers, find_unused_parameters (see above; the same on all replicas, but
            True and leaving it out go together). Accepted without effect: dim, init_sync,
            check_reduction, gradient_as_bucket_view, static_graph, batched_grad_copy. Others raise ConfigError.

    Raises:
        ConfigError: an argument or a parameter (lazy, meta, sparse, integer) that cannot work, by name.
    """

    def __init__(self, manager: ReducerManager | None, module: nn.Module, **kwargs: object) -> None:
        options = check_arguments(kwargs)
        # Not super().__init__(): it would need a default process group and build the C++ reducer.
        nn.Module.__init__(self)
        Joinable.__init__(self)
        _leave_forward_untraced()
        inventory = take_inventory(module, options)
        device_ids = check_devices(options, inventory)
        _define_torch_attributes(self, module, options, inventory, device_ids)
        self._manager: ReducerManager | None = manager
        self._reducer: BucketReducer | None = None
        self._trained = inventory.trained
        self._frozen = inventory.frozen
        self._watch = ParameterWatch(module, (*inventory.trained, *inventory.frozen), inventory.ignored)
        if manager is not None:
            self._register(manager.hooks, inventory, sync_buffers=options.sync_buffers)

    def _register(self, hooks: ReducerHost, inventory: Inventory, *, sync_buffers: bool) -> None:
        reducer = self._new_reducer(hooks, cast("nn.Module", self.module), inventory, sync_buffers=sync_buffers)
        try:
            hooks.register_reducer(reducer)
        except BaseException:
            reducer.remove_hooks()
            raise
        self._reducer = reducer
        if self.device_type != "cpu":
            _warn_about_host_copies(hooks, inventory.trained)

    def _new_reducer(
        self, hooks: ReducerHost, module: nn.Module, inventory: Inventory, *, sync_buffers: bool
    ) -> BucketReducer:
        owners = inventory.buffer_owners if sync_buffers else ()
        return BucketReducer(hooks, module, inventory.trained, inventory.plan, inventory.devices, owners)

    @property
    def gradient_reducer(self) -> BucketReducer:
        """What is registered with the Manager."""
        if self._reducer is None:
            raise UsageError(_INERT)
        return self._reducer

    def unwrap(self) -> nn.Module:
        """Undo the wrapping: remove the hooks, unregister from the Manager, return the module."""
        if self._reducer is not None and self._manager is not None:
            self._reducer.remove_hooks()
            self._manager.hooks.unregister_reducer(self._reducer)
        self._reducer = self._manager = None
        return cast("nn.Module", self.module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Nothing is communicated here."""
        reducer = self._reducer
        watching, ratio = False, 1.0
        if torch.is_grad_enabled():
            if reducer is not None:
                notify(self, opens=True)
                ratio = reducer.batch_ratio
                sync = self.require_backward_grad_sync
                self._check_frozen()
                reducer.before_forward(sync=sync)
                watching = reducer.watches_outputs and sync
            elif self.training:
                raise UsageError(_INERT)
        elif reducer is not None:
            reducer.buffers.put_back()
        if ratio != 1.0:
            inputs, kwargs = unweigh_inputs((inputs, kwargs), ratio)
        if self.device_ids:
            inputs, kwargs = self._move(inputs, kwargs)
        TorchDistributedDataParallel._active_ddp_module = self  # torch.compile cuts its graphs along our buckets
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            # Cleared, not restored: it is global, and with a forward per thread "what was before" outlives its owner.
            if TorchDistributedDataParallel._active_ddp_module is self:
                TorchDistributedDataParallel._active_ddp_module = None
        if ratio != 1.0:
            output = weigh_outputs(output, ratio)
        if watching and reducer is not None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    reducer.watch_output(leaf)
        return output

    def _check_frozen(self) -> None:
        # With find_unused a frozen parameter is an unused one, whoever froze it: zeros here, None if nobody used it.
        for parameter in () if self.find_unused_parameters else self._trained:
            if not parameter.requires_grad:
                self._reject_change()
        for parameter in self._frozen:
            if parameter.requires_grad:
                self._reject_change()
        if newcomer := self._watch.newcomer():
            raise UsageError(
                f"{newcomer} is trained and was not in the module when it was wrapped: its gradient would be this "
                "replica's own. Call unwrap() and wrap the module again, on all replicas"
            )

    def _reject_change(self) -> NoReturn:
        for name, parameter in self.module.named_parameters():
            was = any(parameter is trained for trained in self._trained)
            tolerated = name in self.parameters_to_ignore or (was and self.find_unused_parameters)
            if parameter.requires_grad != was and not tolerated:
                remedy = ", or wrap it with find_unused_parameters=True" if was else ""
                raise UsageError(
                    f"requires_grad of {name} was {was} when the module was wrapped and is {not was} now; all replicas "
                    f"must reduce the same gradients: call unwrap() and wrap the module again, on all of them{remedy}"
                )
        raise UsageError("a parameter was replaced after the module was wrapped: call unwrap() and wrap it again")

    def _move(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = self.device

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        moved: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, move, (inputs, kwargs))
        return moved

    # ------------------------------------------------------------------------------------------- deepcopy and pickle

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_manager", "_reducer", "_trained", "_frozen", "_watch", "process_group", "reducer", "logger"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self.__dict__.update(
            _manager=None,
            _reducer=None,
            _trained=[],
            _frozen=[],
            process_group=None,
            reducer=_NoReducer(),
            logger=None,
        )

    # ---------------------------------------------------------------------- torch's DDP: what has no meaning over here

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join`: a replica that is out of data takes part with weight zero (ft_core.join).

        Raises:
            ConfigError: `divide_by_initial_world_size=True`. The divisor is always what contributed.
        """
        if kwargs.get("divide_by_initial_world_size", False):
            raise ConfigError(
                "divide_by_initial_world_size=True is not possible here: gradients are divided by what contributed to "
                "them, whoever is out of data, healing or gone; leave it out, or pass False"
            )
        return joining_of(self._join_manager()).add(self)

    def _join_manager(self) -> object:
        if self._manager is None:
            raise UsageError(_INERT)
        return self._manager

    def join(
        self, divide_by_initial_world_size: bool = False, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """The context for this model alone; replicas that joined are healed at its end. `Join` takes the optimizer."""
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refused: communication belongs to the Manager."""
        raise _no_comm_hook()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        raise _no_comm_hook()

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        raise _no_comm_hook()

    def _register_fused_optim(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("an optimizer cannot run inside backward: the step is only applied once all agreed on it")

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {"bucket_cap_bytes": self.bucket_bytes_cap, "num_buckets": len(self.gradient_reducer.plan.buckets)}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Nothing is sampled."""

    def _remove_autograd_hooks(self) -> None:
        self.gradient_reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        """Backward always finishes its reduction."""

    def _update_process_group(self, new_process_group: Any) -> None:
        raise ConfigError(f"process_group: {IMPOSSIBLE['process_group']}")

    @property
    def _distributed_rank(self) -> int:
        raise NotAvailableError("there is no fixed rank: use manager.participating_rank()")


_TORCH_FIRST_BUCKET_BYTES = 1 << 20

_INERT = (
    "this DistributedDataParallel is a copy (deepcopy, pickle) or was unwrapped, so nothing reduces its gradients: use "
    "torch.no_grad() or eval(), or wrap it: DistributedDataParallel(manager, copy.module)"
)


def _no_comm_hook() -> ConfigError:
    return ConfigError(
        "communication hooks cannot be used: the Manager reduces the buckets, and the fence rides in them"
    )


class _NoReducer:
    """Stands where torch's C++ reducer would be, for callers that poke it (Lightning's manual optimization)."""

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def prepare_for_backward(self, outputs: object) -> None:
        """Nothing to prepare."""


def _define_torch_attributes(
    ddp: DistributedDataParallel,
    module: nn.Module,
    options: Options,
    inventory: Inventory,
    device_ids: list[torch.device] | None,
) -> None:
    """What torch's constructor would have set and others read: torch.compile, Lightning, Accelerate, scripts."""
    ddp.module = module
    ddp.device = inventory.devices[0]
    ddp.device_type = ddp.device.type
    ddp.is_multi_device_module = len(inventory.devices) > 1
    ddp.device_ids = None if device_ids is None else [device.index for device in device_ids]
    ddp.output_device = None if ddp.device_ids is None else ddp.device_ids[0]
    ddp.dim = 0
    ddp.parameters_to_ignore = inventory.ignored
    ddp._module_parameters = [*inventory.trained, *inventory.frozen]
    ddp.broadcast_buffers = options.sync_buffers
    if not hasattr(ddp, "forward_sync_buffers"):  # a property of torch's class sets it from 2.13 on
        ddp.forward_sync_buffers = options.sync_buffers
    ddp.find_unused_parameters = options.may_freeze
    ddp.gradient_as_bucket_view = True
    ddp.static_graph = False
    ddp.batched_grad_copy = False
    ddp.mixed_precision = None
    ddp.require_backward_grad_sync = True
    ddp.require_forward_param_sync = True
    ddp.skip_all_reduce_unused_params = False
    # Read by torch.compile only, which refuses caps below its first bucket's.
    ddp.bucket_bytes_cap = max(options.buckets.caps_bytes[-1], _TORCH_FIRST_BUCKET_BYTES)
    ddp.bucket_bytes_cap_default = options.buckets.caps_bytes == DEFAULT_CAPS_BYTES
    ddp.process_group = None  # type: ignore[assignment]
    ddp.reducer = _NoReducer()  # type: ignore[assignment]
    ddp.logger = None
    ddp._use_python_reducer = False
    ddp._delay_all_reduce_params = []
    ddp._delay_all_reduce_all_params = False
    ddp._comm_hooks = []
    ddp._has_rebuilt_buckets = False
    ddp._ddp_sink_clone = False
    ddp._lazy_init_ran = True


_warned_backends: set[str] = set()


def _warn_about_host_copies(hooks: ReducerHost, trained: Sequence[nn.Parameter]) -> None:
    backend = hooks.backend
    if not hooks.through_host or backend in _warned_backends:
        return
    _warned_backends.add(backend)
    size_mib = sum(p.numel() * p.element_size() for p in trained) / MIB
    warnings.warn(
        f"gradients on {trained[0].device.type} are reduced over {backend}: {size_mib:.1f} MiB are copied to the host "
        "and back in every step, and summed by the CPU; use a process group of the device (NCCL) for speed",
        stacklevel=4,
    )


# ----------------------------------------------------------------------------------------------------- the simple one


class PureDistributedDataParallel(nn.Module):
    """One `manager.allreduce` per gradient, as it arrives; waited for at the end of backward.

    Short and slow; use `DistributedDataParallel`. It needs the same gradients in the same order on all replicas, so a
    model with parameters that only some replicas use cannot be trained with it, and there is no `no_sync`.
    Does not keep its Manager: without one gradients stay as they are.
    """

    def __init__(self, manager: AllreduceHost, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        works: list[PendingWork] = []
        queued_in = [NO_GRAPH_TASK]
        # Autograd keeps hooks where no garbage collection sees them: one that held the Manager would hold it for good.
        reference = weakref.ref(manager)

        def wait_all() -> None:
            for work in works:
                work.wait()  # the Manager records errors; its works do not raise
            works.clear()

        def reduce(parameter: Tensor) -> None:
            manager = reference()
            if parameter.grad is None or manager is None:
                return
            works.append(manager.allreduce(parameter.grad))
            graph_task = graph_task_id()
            if queued_in[0] != graph_task:
                queued_in[0] = graph_task
                queue_callback(wait_all)

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(reduce)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)
