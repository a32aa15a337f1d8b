"""`ProcessGroup`: a torch process group that can be configured again and again, and aborted at any time.

How it works: it is a Python subclass of `torch.distributed.ProcessGroup`, so everything in torch that takes a group
takes it. Each public collective only brings its arguments into one form and calls `_launch(name, *arguments)`; a kind
of group implements `_launch` (and `configure`, `abort`, ...). `name` is the method's canonical name, so that a
wrapper can pass any call on without knowing it.

Life cycle: constructed unconfigured -> `configure()` (as often as wanted; each replaces the group before it) ->
collectives -> `abort()`, after which every collective raises CollectiveError until the next configure ->
`shutdown()`, for good. Ranks of a group are the ranks given to `configure`; torch's "global ranks" mean the same ones
here.

torch calls some collectives by an older and a newer name, depending on its version; both exist here and are one.

Threads: configure, abort, errored and shutdown from any thread; collectives from one thread at a time per group (their
order is what matches them up across ranks). A kind of group documents where it guarantees more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    HashStore,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import ReduceOp, Work

from ft_core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from datetime import timedelta

Tensors = Sequence[torch.Tensor]
TensorLists = Sequence[Sequence[torch.Tensor]]


class ProcessGroup(dist.ProcessGroup):
    """Base of all groups here; see the file's header for the life cycle."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch's stub lacks this overload
        self._registered_as: str | None = None

    # ---------------------------------------------------------------------------------------- what a kind implements

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        """Form a new group of `world_size` ranks through the store at "host:port/prefix", replacing the one before.

        All ranks pass the same store_addr, with a prefix never used before, and ranks 0..world_size-1. Blocks until
        all are there. Raises ConfigError for arguments that cannot work, PeerError (CollectiveError) if the group did
        not form, also when `abort`, `shutdown` or another `configure` came meanwhile.
        """
        raise NotImplementedError

    def _launch(self, name: str, *arguments: Any) -> Work:
        """Start the collective called `name`."""
        raise NotImplementedError(f"{self.getBackendName()} has no {name}")

    def abort(self) -> None:
        """End the current group: pending works fail here and on peers; collectives raise until the next configure."""
        raise NotImplementedError

    def errored(self) -> Exception | None:
        """Return the first error of the current group (an abort is one), or None. Never blocks."""
        raise NotImplementedError

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a collective launched from now on may take, and the next configure."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """End it for good and free its threads and sockets; idempotent. Unregisters it."""
        raise NotImplementedError

    def connection_fds(self) -> list[int]:
        """Return the descriptors of the connections to peers, whose end shows them this process's death.

        None by default: then peers learn of it when the kernel closes the connections.
        """
        return []

    @property
    def carries_cpu_memory(self) -> bool:
        """Whether collectives of tensors in CPU memory work on it; a group of devices alone says no."""
        return True

    @property
    def blocks_host(self) -> bool:
        """Whether a work's `wait` returns when the collective has ended, and raises if it failed.

        A group of devices says no: there `wait` only puts what the current stream is given next behind the collective,
        which an abort ends with anything in its tensors. `errored` is set before an abort ends anything.
        """
        return True

    def sibling(self) -> ProcessGroup:
        """Return a new, unconfigured group of the same kind and settings (another one beside it)."""
        raise NotImplementedError

    def getBackendName(self) -> str:
        """Return the short name of the kind of group."""
        raise NotImplementedError

    @property
    def torch_backend(self) -> str:
        """Name of the backend of torch's own whose kind of group this is; what torch reports for a registered one."""
        return "gloo"

    @property
    def torch_device_type(self) -> str:
        """The kind of device whose tensors torch is told that a registered one carries."""
        return "cpu"

    def size(self) -> int:
        """Return the number of ranks in the current group."""
        raise NotImplementedError

    def rank(self) -> int:
        """Return this process's rank in the current group."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- c10d's names for the above

    def getSize(self) -> int:
        """The number of ranks: `size()`."""
        return self.size()

    def getRank(self) -> int:
        """This process's rank: `rank()`."""
        return self.rank()

    def name(self) -> str:
        """Return the backend's name."""
        return self.getBackendName()

    def getGroupName(self) -> str:
        """Return the name it is registered with torch under, or "" (torch reads it as `group_name`)."""
        return self._registered_as or ""

    # ------------------------------------------------------------------------------------------------------ registering

    def register(self, name: str) -> ProcessGroup:
        """Make this group known to torch.distributed as "<backend>:<name>" and return it.

        After that `dist.all_reduce(tensor, group=...)`, functional collectives and everything else that looks a group
        up work, with or without `init_process_group`. The group may be configured before or after, and again. torch
        keeps a registered group alive: take it back with `unregister()` or `shutdown()`. Raises ConfigError if the
        name is taken, UsageError if this group is registered already.
        """
        if self._registered_as is not None:
            raise UsageError(f"this group is registered already, as {self._registered_as!r}")
        full_name = f"{self.getBackendName()}:{name}"
        world = c10d._world
        if full_name in world.pg_names.values():
            raise ConfigError(f"name={name!r}: another group is registered with torch.distributed as {full_name!r}")
        _register_process_group(cast("c10d.GroupName", full_name), self)
        tag = f"user:{full_name}"
        world.pg_map[self] = (self.torch_backend, HashStore())
        world.pg_names[self] = cast("c10d.GroupName", full_name)
        world.pg_backend_config[self] = f"{self.torch_device_type}:{self.torch_backend}"
        world.pg_to_tag[self] = tag
        world.tags_to_pg.setdefault(tag, []).append(self)
        self._registered_as = full_name
        self._update_registration(self.size())
        return self

    def unregister(self) -> None:
        """Take `register` back; idempotent."""
        full_name, self._registered_as = self._registered_as, None
        if full_name is None:
            return
        world = c10d._world
        # destroy_process_group() may have emptied torch's tables already.
        if world.pg_names.pop(self, None) is not None:
            _unregister_process_group(cast("c10d.GroupName", full_name))
        world.pg_map.pop(self, None)
        world.pg_backend_config.pop(self, None)
        world.pg_group_ranks.pop(self, None)
        tag = world.pg_to_tag.pop(self, None)
        if tag is not None:
            world.tags_to_pg.pop(tag, None)

    def _update_registration(self, world_size: int) -> None:
        """Tell torch the ranks of the current group; called by `configure`."""
        if self._registered_as is not None:
            c10d._world.pg_group_ranks[self] = {rank: rank for rank in range(world_size)}

    # ------------------------------------------------------------------------------------------------------ collectives
    # torch declares more overloads of some (a single tensor and a root instead of options); torch itself calls only the
    # ones below, hence the ignored overrides.

    def allreduce(self, tensors: torch.Tensor | Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce each tensor over all ranks, in place. `opts`: AllreduceOptions, or a ReduceOp (SUM by default)."""
        return self._launch("allreduce", _several(tensors), _with_op(AllreduceOptions, opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce the tensors over all ranks as one, in place."""
        return self._launch("allreduce_coalesced", list(tensors), _with_op(AllreduceCoalescedOptions, opts))

    def allgather(self, output_tensors: TensorLists, input_tensor: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Collect every rank's `input_tensor[0]` into `output_tensors[0][rank]`."""
        return self._launch("allgather", output_tensors, input_tensor, opts or AllgatherOptions())

    def allgather_coalesced(self, output_lists: TensorLists, input_list: Tensors, opts: Any = None) -> Work:
        """Collect every rank's list of tensors into `output_lists[rank]`."""
        return self._launch("allgather_coalesced", output_lists, input_list, opts or AllgatherOptions())

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Collect every rank's `inputs[i]` into `outputs[i]`, `size()` times as long, for each i."""
        return self._launch("allgather_into_tensor_coalesced", outputs, inputs, opts or AllgatherOptions())

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Do `allgather_into_tensor_coalesced`, under torch's newer name."""
        return self.allgather_into_tensor_coalesced(outputs, inputs, opts)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Collect every rank's `input` into one `output`, `size()` times as long."""
        return self._launch("_allgather_base", output, input, opts or AllgatherOptions())

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Do `_allgather_base`, under torch's newer name."""
        return self._allgather_base(output, input, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Send part j of `input` to rank j, receive rank j's part into part j of `output`; equal parts by default."""
        splits = (output_split_sizes or [], input_split_sizes or [])
        return self._launch("alltoall_base", output, input, *splits, opts or AllToAllOptions())

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Do `alltoall_base`, under torch's newer name."""
        return self.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work:
        """Send `input_tensors[j]` to rank j and receive its tensor into `output_tensors[j]`."""
        return self._launch("alltoall", output_tensors, input_tensors, opts or AllToAllOptions())

    def barrier(self, opts: Any = None) -> Work:
        """Complete once every rank called it."""
        return self._launch("barrier", opts or BarrierOptions())

    def broadcast(self, tensor_list: torch.Tensor | Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Copy rank `opts.rootRank`'s tensor to all, in place."""
        return self._launch("broadcast", _several(tensor_list), opts or BroadcastOptions())

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """Copy rank `root`'s tensor to all, in place."""
        opts = BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    def gather(self, output_tensors: TensorLists, input_tensors: Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Collect every rank's `input_tensors[0]` into rank `opts.rootRank`'s `output_tensors[0][rank]`."""
        return self._launch("gather", output_tensors, input_tensors, opts or GatherOptions())

    def scatter(self, output_tensors: Tensors, input_tensors: TensorLists, opts: Any = None) -> Work:  # type: ignore[override]
        """Send rank `opts.rootRank`'s `input_tensors[0][j]` to rank j's `output_tensors[0]`."""
        return self._launch("scatter", output_tensors, input_tensors, opts or ScatterOptions())

    def reduce(self, tensors: torch.Tensor | Tensors, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce each tensor over all ranks; only rank `opts.rootRank` gets the result."""
        return self._launch("reduce", _several(tensors), _with_op(ReduceOptions, opts))

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: TensorLists, opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce `input_tensors[0][j]` over all ranks into rank j's `output_tensors[0]`."""
        return self._launch("reduce_scatter", output_tensors, input_tensors, _with_op(ReduceScatterOptions, opts))

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Reduce part j of `inputs[i]` over all ranks into rank j's `outputs[i]`, for each i."""
        opts = _with_op(ReduceScatterOptions, opts)
        return self._launch("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Do `reduce_scatter_tensor_coalesced`, under torch's newer name."""
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Reduce part j of `input` over all ranks into rank j's `output`."""
        return self._launch("_reduce_scatter_base", output, input, _with_op(ReduceScatterOptions, opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Do `_reduce_scatter_base`, under torch's newer name."""
        return self._reduce_scatter_base(output, input, opts)

    def send(self, tensors: torch.Tensor | Tensors, dst_rank: int, tag: int = 0) -> Work:
        """Send a tensor to one rank."""
        return self._launch("send", _several(tensors), dst_rank, tag)

    def recv(self, tensors: torch.Tensor | Tensors, src_rank: int, tag: int = 0) -> Work:
        """Receive a tensor from one rank, in place."""
        return self._launch("recv", _several(tensors), src_rank, tag)

    def recv_anysource(self, tensors: torch.Tensor | Tensors, tag: int = 0) -> Work:
        """Receive a tensor from whoever sends one; the work's `_source_rank()` is the sender."""
        return self._launch("recv_anysource", _several(tensors), tag)


def _several(tensors: torch.Tensor | Tensors) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _with_op(kind: Any, opts: Any) -> Any:
    """Return options of `kind` from options, from a bare reduce operation or from None (SUM)."""
    if isinstance(opts, kind):
        return opts
    options = kind()
    if opts is None:
        return options
    if isinstance(opts, (ReduceOp, ReduceOp.RedOpType)):
        options.reduceOp = opts
        return options
    raise ConfigError(f"opts={opts!r}: expected {kind.__name__} or a ReduceOp")
