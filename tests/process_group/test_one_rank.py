"""A group of one rank: what torch's own give, without any of them. On a device: test_gpu.py."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceScatterOptions,
)
from torch.distributed import ReduceOp

from ft_core.errors import CollectiveError, ConfigError, NotAvailableError
from ft_core.process_group import ProcessGroupGloo
from ft_core.process_group.device import incarnation as incarnations
from ft_core.process_group.device.communicator import NothingQueuedError
from ft_core.process_group.device.one_rank import OneRankCommunicator
from ft_core.process_group.device.torch_communicator import _flat
from tests.process_group.fake_communicator import FakeNCCL, note_waits
from tests.process_group.one_rank_cases import (
    DTYPES,
    FACTOR,
    FLOATS,
    OTHERS,
    REDUCING,
    REDUCTIONS,
    all_of,
    bits,
    multiplying,
    values,
    with_op,
)
from tests.process_group.ranks import Store, configure_all, in_threads, nothing_is_left, wait_until
from tests.process_group.test_collectives import torchs_gloo_has_alltoall
from tests.process_group.test_torch_communicator import PretendedStreams

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=20)


@pytest.fixture(scope="module")
def gloo() -> Iterator[ProcessGroupGloo]:
    """torch's own group of one, for tensors in CPU memory."""
    group = ProcessGroupGloo(TIMEOUT)
    group.configure("", "r", 0, 1)
    yield group
    group.shutdown()


@pytest.fixture
def alone() -> OneRankCommunicator:
    return OneRankCommunicator("NCCL", CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("name", REDUCING)
def test_reductions_give_bit_for_bit_what_gloo_gives(
    gloo: ProcessGroupGloo, alone: OneRankCommunicator, name: str, op: str, dtype: torch.dtype
) -> None:
    expected, ours = (REDUCING[name](values(dtype, CPU), REDUCTIONS[op]) for _ in range(2))
    gloo._launch(name, *expected).wait()
    launched = alone.launch(name, *ours)
    assert bits(all_of(ours)) == bits(all_of(expected))
    assert bits(launched.result()) == bits(all_of(expected[:1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OTHERS)
def test_the_others_give_bit_for_bit_what_gloo_gives(
    gloo: ProcessGroupGloo, alone: OneRankCommunicator, case: str, dtype: torch.dtype
) -> None:
    name, arguments = OTHERS[case]
    if name == "alltoall" and not torchs_gloo_has_alltoall():
        pytest.skip("this torch's Gloo has none to compare with")
    expected, ours = (arguments(values(dtype, CPU)) for _ in range(2))
    gloo._launch(name, *expected).wait()
    alone.launch(name, *ours)
    assert bits(all_of(ours)) == bits(all_of(expected))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("by", ["number", "tensor"])
@pytest.mark.parametrize("name", REDUCING)
def test_averages_keep_and_premul_sum_multiplies_in_the_type_of_the_tensors(
    alone: OneRankCommunicator, name: str, by: str, dtype: torch.dtype
) -> None:
    """Gloo has neither. A product of two such numbers is exact in float64 (but for its own), so it is rounded once."""
    kept = REDUCING[name](values(dtype, CPU), ReduceOp.AVG)
    given = [tensor.clone() for tensor in (all_of(kept[1:]) or all_of(kept))]
    alone.launch(name, *kept)
    assert [tensor.view(-1).tolist() for tensor in all_of(kept[:1])] == [tensor.view(-1).tolist() for tensor in given]

    factor = torch.tensor(FACTOR, dtype=dtype)
    ours = REDUCING[name](values(dtype, CPU), multiplying(FACTOR if by == "number" else factor.reshape(1)))
    alone.launch(name, *ours)
    products = [(tensor.double() * factor.double()).to(dtype).view(-1) for tensor in given]
    assert bits(all_of(ours[:1])) == bits(products)


def test_complex_numbers_are_two_numbers(alone: OneRankCommunicator) -> None:
    tensor, opts = torch.tensor([1 + 2j, -3j]), with_op(AllreduceOptions, multiplying(2.0))
    alone.launch("allreduce", [tensor], opts)
    assert tensor.tolist() == [2 + 4j, -6j]
    output = torch.zeros(2, dtype=torch.complex64)
    alone.launch("_allgather_base", output, tensor, AllgatherOptions())
    assert output.tolist() == tensor.tolist()


def test_what_is_copied_is_copied_as_it_lies_in_memory(alone: OneRankCommunicator) -> None:
    """As NCCL does, which knows of addresses and sizes alone."""
    given = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    same, other = torch.empty_like(given), torch.empty(24)
    alone.launch("_allgather_base", same, given, AllgatherOptions())
    alone.launch("_allgather_base", other, given, AllgatherOptions())
    assert torch.equal(same, given)
    assert other.tolist() == given.permute(0, 2, 3, 1).reshape(-1).tolist()
    part = torch.zeros(2, 3)
    alone.launch("_allgather_base", part[1], torch.ones(3), AllgatherOptions())
    assert part.tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("op", [ReduceOp.SUM, multiplying(2.0)], ids=["sum", "times 2"])
def test_a_reduce_scatter_of_parts_keeps_the_order_of_indices_as_one_of_several_ranks_does(
    alone: OneRankCommunicator, op: Any
) -> None:
    """There it is one of a whole, into which the parts were copied: however they lie, with gaps as well."""
    times = 1.0 if op is ReduceOp.SUM else 2.0
    opts = with_op(ReduceScatterOptions, op)
    for given in (torch.arange(6.0).reshape(3, 2).t(), torch.arange(12.0).reshape(2, 6)[:, ::2]):
        output = torch.zeros(2, 3)
        name, (whole_output, whole, _) = _flat([torch.zeros(2, 3)], [[given]], opts)
        assert name == "_reduce_scatter_base"
        alone.launch(name, whole_output, whole, opts)
        alone.launch("reduce_scatter", [output], [[given]], opts)
        assert output.tolist() == whole_output.tolist() == (given * times).tolist()


def test_autograd_neither_minds_nor_learns_of_it(alone: OneRankCommunicator) -> None:
    parameter, given = torch.nn.Parameter(torch.zeros(2)), torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        inferred = torch.zeros(2)
    for output in (parameter, inferred):
        alone.launch("_allgather_base", output, given, AllgatherOptions())
        assert output.tolist() == [1.0, 1.0]
    saved = torch.zeros(2)
    squared = (given * saved).sum()
    alone.launch("_allgather_base", saved, torch.ones(2), AllgatherOptions())
    squared.backward()  # not "modified by an inplace operation": it would not be said of NCCL's
    assert given.grad is not None


# -------------------------------------------------------------------------------------------------------- bad input

ONE, TWO, NONE = torch.ones(2), torch.ones(4), torch.tensor([])


def rooted(kind: Any, root: int) -> Any:
    opts = kind()
    opts.rootRank = root
    return opts


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("send", ([ONE], 0, 0), "send: the NCCL group has one rank, which cannot send to itself"),
        ("recv", ([ONE], 0, 0), "recv: the NCCL group has one rank"),
        ("allreduce", ([], AllreduceOptions()), "allreduce of no tensor"),
        ("allreduce", ([ONE, TWO], AllreduceOptions()), "allreduce: 2 tensors; a group of one rank takes one"),
        ("allgather", ([[ONE, TWO]], [ONE], AllgatherOptions()), "1 in and 2 out"),
        (
            "_allgather_base",
            (TWO, ONE, AllgatherOptions()),
            r"2 elements of torch\.float32 in, 4 of torch",
        ),
        ("_allgather_base", (ONE.long(), ONE, AllgatherOptions()), "expected as many of the same type"),
        ("allreduce", ([TWO[::2]], AllreduceOptions()), r"shape \(2,\) is not contiguous"),
        ("allreduce", ([ONE.to_sparse()], AllreduceOptions()), "is not contiguous"),
        ("reduce_scatter", ([ONE], [[ONE.to_sparse()]], ReduceScatterOptions()), "is not contiguous"),
        ("reduce_scatter", ([ONE.to_sparse()], [[ONE]], ReduceScatterOptions()), "is not contiguous"),
        ("broadcast", ([ONE], rooted(BroadcastOptions, 1)), "rootRank=1"),
        ("gather", ([[ONE]], [ONE], rooted(GatherOptions, 1)), "rootRank=1"),
        ("alltoall_base", (ONE, ONE, [1], [2], AllToAllOptions()), r"splits \[1\], expected \[2\]"),
        ("alltoall_base", (ONE[0], ONE[0], [1], [1], AllToAllOptions()), r"splits \[1\], expected \[\]"),
        ("allreduce", ([ONE.long()], with_op(AllreduceOptions, ReduceOp.BOR)), "NCCL cannot reduce with .*BOR"),
        ("allreduce", ([ONE.bool()], with_op(AllreduceOptions, ReduceOp.AVG)), "no average of booleans"),
        ("allreduce", ([ONE.long()], with_op(AllreduceOptions, multiplying())), "a floating-point type"),
        (
            "allreduce_coalesced",
            ([ONE, ONE.double()], AllreduceCoalescedOptions()),
            r"tensors of one type, not of torch\.float32 and torch\.float64",
        ),
        (
            "allreduce",
            ([ONE.to(torch.complex64)], with_op(AllreduceOptions, ReduceOp.MAX)),
            "complex numbers with .*MAX",
        ),
        ("allreduce", ([ONE.short()], AllreduceOptions()), r"no library carries tensors of torch\.int16"),
        ("broadcast", ([ONE.to(torch.complex64).conj()], BroadcastOptions()), r"call its resolve_conj\(\) first"),
        ("_allgather_base", (TWO[:3], TWO[1:], AllgatherOptions()), "input and output overlap in memory"),
        (
            "_reduce_scatter_base",
            (ONE, ONE, with_op(ReduceScatterOptions, multiplying(torch.ones(1).double()))),
            r"factor is torch\.float64 on cpu, its tensors are torch\.float32 on cpu",
        ),
    ],
)
def test_mistakes_are_told_and_change_nothing(alone: OneRankCommunicator, name: str, arguments: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        alone.launch(name, *arguments)
    assert (ONE.tolist(), TWO.tolist()) == ([1.0] * 2, [1.0] * 4)


@pytest.mark.parametrize("name", ["allgather_coalesced", "recv_anysource", "nonsense"])
def test_what_nccl_has_not_is_refused_by_one_rank_as_well(alone: OneRankCommunicator, name: str) -> None:
    with pytest.raises(NotAvailableError, match=f"{name}: NCCL has none, on one rank or on several"):
        alone.launch(name, [ONE], 0)


# ---------------------------------------------------------------------------------------------------- when it is done


def pretended() -> tuple[OneRankCommunicator, PretendedStreams]:
    streams = PretendedStreams()
    streams.Event = type("Event", (PretendedStreams.Event,), {"streams": streams})  # type: ignore[assignment]
    return OneRankCommunicator("NCCL", CPU, streams), streams


@pytest.mark.parametrize("name", ["allreduce", "barrier"])
def test_a_collective_has_ended_when_the_stream_it_was_launched_on_has_come_so_far(name: str) -> None:
    """Also one that does nothing: the kernel that writes what is reduced is queued before it."""
    alone, streams = pretended()
    streams.held = True
    arguments = REDUCING[name](values(torch.float32, CPU), ReduceOp.SUM) if name in REDUCING else (None,)
    launched = alone.launch(name, *arguments)
    assert streams.told == ["record on current"]
    assert not launched.is_done()
    launched.order()
    assert streams.told[1:] == ["the current stream waits"]
    assert launched.future().done()
    assert streams.told[2:] == ["the current stream waits"]  # then what waits for the future waits for it
    alone.abort()
    assert not launched.is_done()  # there is nothing to end, and what was queued has not come yet
    streams.held = False
    assert launched.is_done()
    assert alone.query() is None
    assert repr(alone) == "OneRankCommunicator(NCCL, cpu)"


# ---------------------------------------------------------------------------------------------------------- its group


def test_the_survivor_of_a_pair_goes_on_without_the_library_and_takes_the_next_peer_with_it(store: Store) -> None:
    pair = [FakeNCCL(TIMEOUT) for _ in range(2)]
    configure_all(pair, store.fresh())
    survivor, victim = pair
    work = survivor.allreduce([torch.ones(2)])
    victim.abort()
    with pytest.raises(CollectiveError):
        work.wait()
    survivor.configure("nowhere.invalid:1/x", "replica0", 0, 1)
    tensor = torch.ones(2)
    assert survivor.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]
    assert survivor.errored() is None
    assert len(survivor.communicators) == 1
    with pytest.raises(ConfigError, match="cannot send to itself"):
        survivor.send([tensor], 0)
    assert survivor.errored() is None
    configure_all(pair, store.fresh())
    assert len(survivor.communicators) == 2
    in_threads(2, lambda rank: pair[rank].allreduce([torch.ones(2)]).wait())
    for group in pair:
        group.shutdown()
    assert nothing_is_left()


def test_a_group_of_one_waits_for_what_runs_of_the_one_before_and_the_next_for_its_abort(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then that may write to tensors that nobody waits for; then there is memory to free, for half a second."""
    waits = note_waits(monkeypatch)
    end, free = threading.Event(), threading.Event()
    pair = [FakeNCCL(TIMEOUT) for _ in range(2)]
    configure_all(pair, store.fresh())
    first, calls = pair[0]._incarnation, pair[0].behaviour.calls
    assert first is not None
    pair[0].behaviour.hang_abort, pair[0].behaviour.hang_freeing = end, free
    pair[0].allreduce([torch.ones(2)])
    pair[0].abort()
    alone = threading.Thread(target=pair[0].configure, args=("", "replica0", 0, 1))
    alone.start()
    assert wait_until(lambda: (first, True) in waits)
    end.set()
    alone.join(10)
    assert repr(pair[0]) == "FakeNCCL(rank 0 of 1, ready, cpu, 0 in flight)"
    assert calls[-1] == "abort"
    between = []
    for _ in range(3):  # groups of one that are released meanwhile hand it on
        between.append(pair[0]._incarnation)
        pair[0].configure("", "replica0", 0, 1)
    assert wait_until(lambda: not any(one in incarnations._live for one in between))
    both = threading.Thread(target=configure_all, args=(pair, store.fresh()))
    both.start()
    assert wait_until(lambda: (first, False) in waits)
    free.set()
    both.join(10)
    assert calls[-4:] == ["abort", "/abort", "init", "/init"]
    for group in pair:
        group.shutdown()
    assert nothing_is_left()


def test_a_group_of_one_waits_for_the_whole_abort_where_a_launch_has_failed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have queued a kernel before it failed, which has no event: only the abort's return tells of its end."""
    pair = [FakeNCCL(TIMEOUT) for _ in range(2)]
    configure_all(pair, store.fresh())
    behaviour, free = pair[0].behaviour, threading.Event()
    behaviour.launch_error, behaviour.hang_freeing = RuntimeError("NCCL error"), free
    with pytest.raises(CollectiveError):
        pair[0].allreduce([torch.ones(2)])
    assert wait_until(lambda: behaviour.calls[-1] == "abort")
    looks = note_waits(monkeypatch)
    alone = threading.Thread(target=pair[0].configure, args=("", "replica0", 0, 1))
    alone.start()
    assert wait_until(lambda: bool(looks))
    assert "forming" in repr(pair[0])
    free.set()
    alone.join(10)
    assert behaviour.calls[-1] == "/abort"
    assert pair[0].allreduce([torch.ones(2)]).wait()
    for group in pair:
        group.shutdown()
    assert nothing_is_left()


def test_a_group_of_one_does_not_where_the_launch_was_refused_before_anything_was_queued(store: Store) -> None:
    """As NCCL does where it has seen the peer's end before the lighthouse has told of it."""
    pair = [FakeNCCL(TIMEOUT) for _ in range(2)]
    configure_all(pair, store.fresh())
    behaviour, free = pair[0].behaviour, threading.Event()
    behaviour.launch_error, behaviour.hang_freeing = NothingQueuedError("remote process exited"), free
    with pytest.raises(CollectiveError, match="remote process exited"):
        pair[0].allreduce([torch.ones(2)])
    pair[0].configure("", "replica0", 0, 1)
    assert wait_until(lambda: behaviour.calls[-1] == "abort")
    assert pair[0].allreduce([torch.ones(2)]).wait()
    free.set()
    for group in pair:
        group.shutdown()
    assert nothing_is_left()


def test_a_group_of_one_waits_for_a_launch_that_is_inside_when_the_one_before_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not in flight yet, and will be."""
    looks = note_waits(monkeypatch)
    pair = [FakeNCCL(TIMEOUT) for _ in range(2)]
    configure_all(pair, store.fresh())
    behaviour, go_on = pair[0].behaviour, threading.Event()
    behaviour.hang_launch = go_on
    inside = threading.Thread(target=pair[0].allreduce, args=([torch.ones(2)],))
    inside.start()
    assert wait_until(lambda: behaviour.calls[-1] == "launch")
    alone = threading.Thread(target=pair[0].configure, args=("", "replica0", 0, 1))
    alone.start()
    waited = wait_until(lambda: bool(looks))
    go_on.set()
    assert waited
    alone.join(10)
    inside.join(10)
    assert behaviour.calls[2:] == ["launch", "/launch", "abort", "/abort"]
    for group in pair:
        group.shutdown()
    assert nothing_is_left()


def test_groups_that_are_over_are_not_kept_by_those_after_them() -> None:
    group = FakeNCCL(TIMEOUT)
    for _ in range(20):
        group.configure("", "r", 0, 1)

    def kept() -> int:
        count, one = 0, group._incarnation
        while one is not None and one._before is not None:
            count, one = count + 1, one._before
        return count

    assert wait_until(lambda: kept() <= 1)  # the last one may have been ending when this one formed
    group.shutdown()
    assert nothing_is_left()


def test_an_abort_of_one_returns_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeNCCL(TIMEOUT)
    for _ in range(3):
        begin = time.monotonic()
        group.configure("", "r", 0, 1)
        work = group.allreduce([torch.ones(2)])
        assert work.wait()
        assert work.is_success()
        group.abort()
        with pytest.raises(CollectiveError):
            group.allreduce([torch.ones(2)])
        assert work.is_success()
        assert time.monotonic() - begin < 1.0  # of some milliseconds
    assert group.communicators == []
    group.shutdown()
    assert nothing_is_left()
