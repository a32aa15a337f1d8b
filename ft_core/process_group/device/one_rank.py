"""`OneRankCommunicator`: the communicator of a group of one rank, which needs no library.

How it works. One rank has nobody to meet and nothing to wait for. But a communicator of NCCL's would have to wait for
the whole abort of the one before, half a second, as it allocates (`Incarnation.wait_ended`), and the survivor of a pair
would wait for that. So a group of one is torch operations on the current stream, which do what NCCL does with one rank.
A reduction leaves its tensors as they are; so does an average (NCCL multiplies by one,
which changes nothing but the payload of a NaN); PREMUL_SUM multiplies, also at reduce-scatters, where torch's NCCL of
one rank does not. What has inputs beside its outputs copies them, in the order in which they lie in memory, but for the
parts of a reduce-scatter (`_is_by_index`). What NCCL can do with no number of ranks is refused, so that a script learns
of it before a second replica comes: bitwise reductions, `allgather_coalesced`, messages from any rank, types that it
does not know, several types at once, extremes and products of complex numbers. A message to or from this rank is
refused as well, as torch refuses it.

When a collective has ended: an event of the current stream, recorded behind it, also where there was nothing to do.
What is reduced is queued on that stream, and not there before the event; a work that said so earlier would be wrong
about its result, and a barrier would not wait for the device.

Invariants: `init` touches neither store nor device; nothing is allocated but the factor of a PREMUL_SUM. There is
nothing to abort: what was launched reads and writes this process's memory alone, and ends by itself. That may be after
the group has ended and dropped the tensors, so the stream is noted with them (`record_stream`).

Threads: launches one at a time; the current stream is the calling thread's. The rest: any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from ft_core.errors import ConfigError, NotAvailableError
from ft_core.process_group.device.tensors import tensors_of
from ft_core.strides import fills_its_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "reduce", "broadcast"})
COPYING = frozenset(
    {
        "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "gather", "scatter", "alltoall",
        "alltoall_base", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    }
)  # fmt: skip
"""Their first argument is what is written, the second what is read; both may be lists, of lists too."""
MESSAGES = frozenset({"send", "recv"})
_OF_SEVERAL = frozenset(
    {"allreduce_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"}
)  # fmt: skip
"""What takes more than one tensor per rank."""
_KEEPING = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT)
"""Reductions of one tensor that are that tensor, whatever its type."""
_MULTIPLIED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_OF_REAL_ALONE = (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT)
"""Reductions that torch refuses for complex numbers, which are sent as two numbers each."""
_UNKNOWN = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})
"""Types for which neither NCCL nor XCCL has a name."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""What is written and what is read, which may be the same."""


class OneRankCommunicator:
    """A group of one rank for tensors on `device`. `what`: the library in whose place it is, for messages.

    `streams`: the module with that kind of device's streams and events; torch's by default.
    """

    kind = "one rank"

    def __init__(self, what: str, device: torch.device, streams: Any = None) -> None:
        self._what = what
        self._device = device
        self._streams: Any = streams or torch.get_device_module(device.type)

    def __repr__(self) -> str:
        return f"OneRankCommunicator({self._what}, {self._device})"

    def init(self, store: Store, rank: int, world_size: int, checkpoint: Callable[[], None]) -> None:
        """Do nothing: there is nobody to connect to."""
        del store, checkpoint
        assert (rank, world_size) == (0, 1), f"rank {rank} of {world_size}"

    def launch(self, name: str, *arguments: Any) -> OneRankLaunched:
        """Do it on the current stream; ConfigError for mistakes, NotAvailableError for what the library lacks."""
        pairs = self._pairs(name, arguments)
        factor = self._factor(name, arguments[-1], pairs)
        stream = self._streams.current_stream(self._device)
        for output, given in pairs:
            if factor is not None or output.data_ptr() != given.data_ptr():
                self._write(output, given, factor, stream, by_index=_is_by_index(name, output, given))
        event = self._streams.Event()
        event.record(stream)
        return OneRankLaunched(arguments, event, self._streams, self._device)

    def query(self) -> str | None:
        """Return None: nothing can go wrong with it."""
        return None

    def abort(self) -> None:
        """Do nothing: nothing of it waits for anybody."""

    # ---------------------------------------------------------------------------------------------------------- checks

    def _pairs(self, name: str, arguments: tuple[Any, ...]) -> Pairs:
        if name == "barrier":
            return []
        if name in MESSAGES:
            raise ConfigError(f"{name}: the {self._what} group has one rank, which cannot send to itself")
        if name not in IN_PLACE and name not in COPYING:
            raise NotAvailableError(f"{name}: {self._what} has none, on one rank or on several")
        outputs = list(tensors_of(arguments[:1]))
        inputs = outputs if name in IN_PLACE else list(tensors_of(arguments[1:2]))
        if not outputs and not inputs:
            raise ConfigError(f"{name} of no tensor")
        if len(outputs) != len(inputs) or (len(outputs) > 1 and name not in _OF_SEVERAL):
            found = f"{len(outputs)}" if name in IN_PLACE else f"{len(inputs)} in and {len(outputs)} out"
            raise ConfigError(f"{name}: {found} tensors; a group of one rank takes one, or as many in as out")
        root = getattr(arguments[-1], "rootRank", 0), getattr(arguments[-1], "rootTensor", 0)
        if root != (0, 0):
            raise ConfigError(f"{name}: rootRank={root[0]}, rootTensor={root[1]}: a group of one rank has only 0 and 0")
        pairs = list(zip(outputs, inputs, strict=True))
        for output, given in pairs:
            _check(name, output, given)
        if len({given.dtype for given in inputs}) > 1:
            raise ConfigError(f"{name}: {self._what} takes several tensors of one type, not of {_types(inputs)}")
        if name == "alltoall_base":
            _check_splits(*pairs[0], *arguments[2:4])
        return pairs

    def _factor(self, name: str, opts: Any, pairs: Pairs) -> torch.Tensor | None:
        """What a reduction multiplies its tensors with, as NCCL does: in their own precision. None: with nothing."""
        op = getattr(opts, "reduceOp", None)
        if any(given.is_complex() for _, given in pairs) and any(op == refused for refused in _OF_REAL_ALONE):
            raise ConfigError(f"{name}: {self._what} cannot reduce complex numbers with {getattr(op, 'op', op)}")
        if op is None or any(op == keeping for keeping in _KEEPING):
            return None
        if op == ReduceOp.AVG:
            if any(given.dtype == torch.bool for _, given in pairs):
                raise ConfigError(f"{name}: {self._what} has no average of booleans")
            return None
        if op != ReduceOp.PREMUL_SUM:
            raise ConfigError(f"{name}: {self._what} cannot reduce with {getattr(op, 'op', op)}")
        dtype = pairs[0][1].dtype.to_real()
        if dtype not in _MULTIPLIED:
            raise ConfigError(f"{name}: PREMUL_SUM takes tensors of a floating-point type, not {dtype}")
        factor = op.__getstate__()[1]
        if not isinstance(factor, torch.Tensor):
            return torch.tensor(factor, dtype=dtype)
        if factor.dtype != dtype or factor.device != self._device:
            there = f"{factor.dtype} on {factor.device}"
            raise ConfigError(f"{name}: PREMUL_SUM's factor is {there}, its tensors are {dtype} on {self._device}")
        return factor.reshape(-1)[:1]

    def _write(
        self, output: torch.Tensor, given: torch.Tensor, factor: torch.Tensor | None, stream: Any, *, by_index: bool
    ) -> None:
        # As a library would: whatever autograd thinks of these tensors, and without telling it.
        with torch.inference_mode():
            target, source = _real(output), _real(given)
            if not by_index:
                target, source = _as_it_lies(target), _as_it_lies(source)
            if factor is None:
                target.copy_(source)
            else:
                torch.mul(source, factor, out=target)
        for tensor in (output, given, factor):
            if tensor is not None and tensor.device.type != "cpu":  # whose memory has no streams
                tensor.record_stream(stream)


class OneRankLaunched:
    """One collective: `event` is behind it."""

    def __init__(self, arguments: tuple[Any, ...], event: Any, streams: Any, device: torch.device) -> None:
        self._arguments = arguments
        self._event = event
        self._streams = streams
        self._device = device

    def order(self) -> None:
        """Have the current stream of the device continue after it."""
        self._streams.current_stream(self._device).wait_event(self._event)

    def is_done(self) -> bool:
        """Whether the stream that it was launched on has come so far."""
        return bool(self._event.query())

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return list(tensors_of(self._arguments[:1]))

    def future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors, for callbacks on the device's streams."""
        devices: list[int | str | torch.device] = [] if self._device.type == "cpu" else [self._device]
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        self.order()  # whoever waits for the future waits for what the current stream has come to here
        future.set_result(self.result())
        return future


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without a history; a complex number is two."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).data


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as they follow each other in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_by_index(name: str, output: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether it is copied in the order of its indices: `TorchCommunicator` makes one whole of such parts."""
    strided = given.layout == torch.strided and output.is_contiguous()
    return name == "reduce_scatter" and strided and output.shape == given.shape


def _check(name: str, output: torch.Tensor, given: torch.Tensor) -> None:
    if given.dtype != output.dtype or given.numel() != output.numel():
        sizes = f"{given.numel()} elements of {given.dtype} in, {output.numel()} of {output.dtype} out"
        raise ConfigError(f"{name}: {sizes}; expected as many of the same type")
    if given.dtype in _UNKNOWN:
        raise ConfigError(f"{name}: no library carries tensors of {given.dtype}")
    for tensor in (output, given):
        dense = tensor.layout == torch.strided and fills_its_memory(tensor)
        if not (dense or (tensor is given and _is_by_index(name, output, given))):
            raise ConfigError(f"{name}: a tensor of shape {tuple(tensor.shape)} is not contiguous in memory")
        if tensor.is_conj():
            raise ConfigError(f"{name}: a tensor is not conjugated yet: call its resolve_conj() first")
    if _overlap(output, given):
        raise ConfigError(f"{name}: input and output overlap in memory; expected the same memory, or none in common")


def _overlap(output: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether they share a part of their memory. All of it is in place, which is well."""
    first, second = output.data_ptr(), given.data_ptr()
    return first != second and first < second + _span(given) and second < first + _span(output)


def _span(tensor: torch.Tensor) -> int:
    """How many bytes of memory its elements lie in."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _types(tensors: list[torch.Tensor]) -> str:
    return " and ".join(sorted({str(tensor.dtype) for tensor in tensors}))


def _check_splits(output: torch.Tensor, given: torch.Tensor, to_receive: list[int], to_send: list[int]) -> None:
    for tensor, splits in ((output, to_receive), (given, to_send)):
        whole = list(tensor.shape[:1])
        if splits and list(splits) != whole:
            raise ConfigError(f"alltoall_base: splits {list(splits)}, expected {whole}: one rank takes it whole")
