"""Every collective, on one to three ranks, over each kind of group, against what it should give; torch's front doors.

Where a kind has no such collective it says so, and the group is as good as before."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    HashStore,
    ReduceOptions,
    ScatterOptions,
)
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo
from torch.distributed import ReduceOp

from ft_core.errors import ConfigError, NotAvailableError, UsageError
from ft_core.process_group import ProcessGroup, ProcessGroupGloo
from tests.process_group.fake_communicator import FakeNCCL
from tests.process_group.ranks import (
    ALL_KINDS,
    KINDS,
    Store,
    configure_all,
    groups_of,
    in_threads,
    nothing_is_left,
    set_aside_lost_groups,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

wait_tensor: Callable[[torch.Tensor], torch.Tensor] = functional.wait_tensor

Groups = list[ProcessGroup]


@pytest.fixture(
    params=[(kind, n) for kind in ALL_KINDS for n in (1, 2, 3)], scope="module", ids=lambda p: f"{p[0]}-{p[1]}"
)
def groups(request: pytest.FixtureRequest, store: Store) -> Iterator[Groups]:
    kind, count = request.param
    set_aside_lost_groups()
    with groups_of(kind, count, store) as formed:
        yield formed
    assert nothing_is_left()  # no collective left something behind that keeps its group alive


def own(rank: int, numel: int = 2) -> torch.Tensor:
    return torch.full((numel,), float(rank + 1))


def on_all(groups: Groups, do: Callable[[ProcessGroup, int], Any]) -> list[Any]:
    return in_threads(len(groups), lambda rank: do(groups[rank], rank))


def is_nccl(groups: Groups) -> bool:
    return isinstance(groups[0], FakeNCCL)


def values(result: Any) -> Any:
    return result.tolist() if isinstance(result, torch.Tensor) else [values(part) for part in result]


def torchs_gloo_has_alltoall() -> bool:
    """torch 2.11's has none."""
    one = torch.zeros(1)
    try:
        alone: Any = TorchGloo(HashStore(), 0, 1, timedelta(seconds=10))
        alone.alltoall([one.clone()], [one], AllToAllOptions()).wait()
    except RuntimeError:
        return False
    return True


def rooted(kind: Any, root: int) -> Any:
    opts = kind()
    opts.rootRank = root
    return opts


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (None, lambda n: float(sum(range(1, n + 1)))),
        (ReduceOp.SUM, lambda n: float(sum(range(1, n + 1)))),
        (ReduceOp.MIN, lambda n: 1.0),
        (ReduceOp.MAX, lambda n: float(n)),
        (ReduceOp.PRODUCT, lambda n: float([1, 1, 2, 6][n])),
    ],
)
def test_allreduce(groups: Groups, operation: Any, expected: Callable[[int], float]) -> None:
    def do(group: ProcessGroup, rank: int) -> torch.Tensor:
        tensor = own(rank)
        group.allreduce([tensor], operation).wait()
        return tensor

    assert values(on_all(groups, do)) == [[expected(len(groups))] * 2] * len(groups)


def test_allreduce_bitwise_or_takes_options_and_a_bare_tensor(groups: Groups) -> None:
    def do(group: ProcessGroup, rank: int) -> torch.Tensor:
        opts = AllreduceOptions()
        opts.reduceOp = ReduceOp(ReduceOp.BOR)
        tensor = torch.tensor([1 << rank])
        if is_nccl(groups):
            with pytest.raises(ValueError, match="cannot reduce with"):
                group.allreduce(tensor, opts)
            opts.reduceOp = ReduceOp(ReduceOp.SUM)
        group.allreduce(tensor, opts).wait()
        return tensor

    assert values(on_all(groups, do)) == [[2 ** len(groups) - 1]] * len(groups)


def test_an_average_is_refused_before_anything_is_sent_where_there_is_none(groups: Groups) -> None:
    if is_nccl(groups):
        on_all(groups, lambda group, rank: group.allreduce([own(rank)], ReduceOp.AVG).wait())
    else:
        with pytest.raises(ConfigError, match=r"AVG.*SUM"):
            groups[0].allreduce([own(0)], ReduceOp.AVG)
    with pytest.raises(ConfigError, match="expected AllreduceOptions"):
        groups[0].allreduce([own(0)], "sum")
    assert groups[0].errored() is None


def test_a_mistake_in_the_arguments_does_not_break_the_group(groups: Groups) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"ProcessGroupGloo::allreduce|allreduce of no tensor"):
        groups[0].allreduce([]).wait()
    assert groups[0].errored() is None


def test_allreduce_coalesced(groups: Groups) -> None:
    def do(group: ProcessGroup, rank: int) -> list[torch.Tensor]:
        tensors = [own(rank, 1), own(rank, 3)]
        group.allreduce_coalesced(tensors).wait()
        return tensors

    total = float(sum(range(1, len(groups) + 1)))
    assert values(on_all(groups, do)) == [[[total], [total] * 3]] * len(groups)


def test_allgather(groups: Groups) -> None:
    n = len(groups)

    def do(group: ProcessGroup, rank: int) -> list[torch.Tensor]:
        outputs = [torch.zeros(2) for _ in range(n)]
        group.allgather([outputs], [own(rank)]).wait()
        return outputs

    assert values(on_all(groups, do)) == [[[float(r + 1)] * 2 for r in range(n)]] * n


def test_allgather_coalesced(groups: Groups) -> None:
    n = len(groups)

    def do(group: ProcessGroup, rank: int) -> list[list[torch.Tensor]]:
        outputs = [[torch.zeros(1), torch.zeros(2)] for _ in range(n)]
        if is_nccl(groups):
            with pytest.raises(NotImplementedError):
                group.allgather_coalesced(outputs, [own(rank, 1), own(rank, 2)])
            return [[own(r, 1), own(r, 2)] for r in range(n)]
        group.allgather_coalesced(outputs, [own(rank, 1), own(rank, 2)]).wait()
        return outputs

    assert values(on_all(groups, do)) == [[[[float(r + 1)], [float(r + 1)] * 2] for r in range(n)]] * n


@pytest.mark.parametrize("name", ["_allgather_base", "all_gather_single"])
def test_allgather_into_one_tensor(groups: Groups, name: str) -> None:
    n = len(groups)

    def do(group: ProcessGroup, rank: int) -> torch.Tensor:
        output = torch.zeros(2 * n)
        getattr(group, name)(output, own(rank)).wait()
        return output

    assert values(on_all(groups, do)) == [[float(r + 1) for r in range(n) for _ in range(2)]] * n


@pytest.mark.parametrize("name", ["allgather_into_tensor_coalesced", "all_gather_single_coalesced"])
def test_allgather_into_tensors(groups: Groups, name: str) -> None:
    n = len(groups)

    def do(group: ProcessGroup, rank: int) -> list[torch.Tensor]:
        outputs = [torch.zeros(n), torch.zeros(2 * n)]
        getattr(group, name)(outputs, [own(rank, 1), own(rank, 2)]).wait()
        return outputs

    ones = [float(r + 1) for r in range(n)]
    assert values(on_all(groups, do)) == [[ones, [one for one in ones for _ in range(2)]]] * n


@pytest.mark.parametrize("name", ["_reduce_scatter_base", "reduce_scatter_single"])
def test_reduce_scatter_from_one_tensor(groups: Groups, name: str) -> None:
    n = len(groups)

    def do(group: ProcessGroup, rank: int) -> torch.Tensor:
        output = torch.zeros(1)
        getattr(group, name)(output, torch.arange(n, dtype=torch.float32) * (rank + 1)).wait()
        return output

    total = sum(range(1, n + 1))
    assert values(on_all(groups, do)) == [[float(r * total)] for r in range(n)]


@pytest.mark.parametrize("name", ["reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"])
def test_reduce_scatter_from_tensors(groups: Groups, name: str) -> None:
    n = len(groups)

    def do(group: ProcessGroup, rank: int) -> list[torch.Tensor]:
        outputs = [torch.zeros(1), torch.zeros(2)]
        parts = torch.arange(n, dtype=torch.float32) * (rank + 1)
        getattr(group, name)(outputs, [parts, parts.repeat_interleave(2)]).wait()
        return outputs

    total = sum(range(1, n + 1))
    assert values(on_all(groups, do)) == [[[float(r * total)], [float(r * total)] * 2] for r in range(n)]


def test_reduce_scatter(groups: Groups) -> None:
    n = len(groups)

    def do(group: ProcessGroup, rank: int) -> torch.Tensor:
        output = torch.zeros(2)
        group.reduce_scatter([output], [[own(j) * (rank + 1) for j in range(n)]]).wait()
        return output

    total = sum(range(1, n + 1))
    assert values(on_all(groups, do)) == [[float((r + 1) * total)] * 2 for r in range(n)]


@pytest.mark.parametrize("name", ["alltoall_base", "all_to_all_single"])
def test_alltoall_of_one_tensor(groups: Groups, name: str) -> None:
    n = len(groups)

    def do(group: ProcessGroup, rank: int) -> list[torch.Tensor]:
        equal, split = torch.zeros(n), torch.zeros(n)
        getattr(group, name)(equal, torch.arange(n) + 10.0 * rank).wait()
        getattr(group, name)(split, torch.arange(n) + 10.0 * rank, [1] * n, [1] * n).wait()
        return [equal, split]

    assert values(on_all(groups, do)) == [[[10.0 * j + r for j in range(n)]] * 2 for r in range(n)]


def test_alltoall(groups: Groups) -> None:
    n = len(groups)

    def do(group: ProcessGroup, rank: int) -> list[torch.Tensor]:
        outputs = [torch.zeros(1) for _ in range(n)]
        group.alltoall(outputs, [torch.tensor([10.0 * rank + j]) for j in range(n)]).wait()
        return outputs

    if not is_nccl(groups) and not torchs_gloo_has_alltoall():
        with pytest.raises(NotAvailableError, match=r"alltoall: Backend gloo does not support alltoall \(torch 2"):
            on_all(groups, do)
        return  # the group is as good as before: the other tests use it
    assert values(on_all(groups, do)) == [[[10.0 * j + r] for j in range(n)] for r in range(n)]


def test_broadcast(groups: Groups) -> None:
    last = len(groups) - 1

    def do(group: ProcessGroup, rank: int) -> list[torch.Tensor]:
        first, second = own(rank), own(rank)
        group.broadcast([first], rooted(BroadcastOptions, last)).wait()
        group.broadcast_one(second, 0).wait()
        return [first, second]

    assert values(on_all(groups, do)) == [[[last + 1.0] * 2, [1.0] * 2]] * len(groups)


def test_reduce(groups: Groups) -> None:
    last = len(groups) - 1

    def do(group: ProcessGroup, rank: int) -> torch.Tensor:
        tensor = own(rank)
        group.reduce([tensor], rooted(ReduceOptions, last)).wait()
        return tensor

    assert values(on_all(groups, do)[last]) == [float(sum(range(1, len(groups) + 1)))] * 2


def test_gather_and_scatter(groups: Groups) -> None:
    n = len(groups)
    last = n - 1

    def do(group: ProcessGroup, rank: int) -> list[Any]:
        gathered = [torch.zeros(2) for _ in range(n)] if rank == last else []
        group.gather([gathered] if rank == last else [], [own(rank)], rooted(GatherOptions, last)).wait()
        mine = torch.zeros(2)
        parts = [[own(10 * j) for j in range(n)]] if rank == last else []
        group.scatter([mine], parts, rooted(ScatterOptions, last)).wait()
        return [gathered, mine]

    results = values(on_all(groups, do))
    assert results[last][0] == [[float(r + 1)] * 2 for r in range(n)]
    assert [result[1] for result in results] == [[float(10 * r + 1)] * 2 for r in range(n)]


def test_send_and_receive(groups: Groups) -> None:
    n = len(groups)
    if n == 1:
        pytest.skip("nobody to send to")

    def do(group: ProcessGroup, rank: int) -> Any:
        if rank > 0:
            work = group.send([own(rank)], 0, rank)
            work.wait()
            if isinstance(group, ProcessGroupGloo):
                with pytest.raises(NotAvailableError, match="send"):
                    work.get_future()
            elif not is_nccl(groups):
                assert len(work.get_future().wait()) == 1
            return None
        named = [torch.zeros(2) for _ in range(1, n)]
        for other in range(1, n):
            group.recv([named[other - 1]], other, other).wait()
        return values(named)

    assert on_all(groups, do)[0] == [[r + 1.0] * 2 for r in range(1, n)]


def test_receive_from_any(groups: Groups) -> None:
    n = len(groups)
    if n == 1:
        pytest.skip("nobody to send to")
    if is_nccl(groups):
        with pytest.raises(NotImplementedError):
            groups[0].recv_anysource([torch.zeros(2)], 77)
        assert groups[0].errored() is None
        return

    def do(group: ProcessGroup, rank: int) -> Any:
        if rank > 0:
            group.send([own(rank)], 0, 77).wait()
            return None
        sources = []
        for _ in range(1, n):
            tensor = torch.zeros(2)
            work = group.recv_anysource([tensor], 77)
            work.wait()
            sources.append(work._source_rank())
            assert values(tensor) == [work._source_rank() + 1.0] * 2
        return sorted(sources)

    assert on_all(groups, do)[0] == list(range(1, n))


def test_barrier(groups: Groups) -> None:
    on_all(groups, lambda group, _: group.barrier().wait())


def test_monitored_barrier(store: Store) -> None:
    with groups_of("gloo", 2, store) as groups:
        on_all(groups, lambda group, _: cast("ProcessGroupGloo", group).monitored_barrier())


def test_the_future_and_the_result_hold_the_tensors(groups: Groups) -> None:
    def do(group: ProcessGroup, rank: int) -> Any:
        work = group.allreduce([own(rank)])
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        total = doubled.wait()
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert repr(work) == f"{type(work).__name__}(allreduce, done)"
        return [total, work.result()[0]]

    total = float(sum(range(1, len(groups) + 1)))
    assert values(on_all(groups, do)) == [[[2 * total] * 2, [total] * 2]] * len(groups)


def test_a_work_can_be_waited_for_on_another_thread(groups: Groups) -> None:
    works = on_all(groups, lambda group, rank: group.allreduce([own(rank)]))
    assert in_threads(len(groups), lambda rank: works[rank].wait()) == [True] * len(groups)
    assert works[0].wait()


@pytest.mark.parametrize("kind", KINDS)
def test_torch_distributed_takes_a_registered_group(store: Store, kind: str) -> None:
    with groups_of(kind, 2, store) as groups:
        for rank, group in enumerate(groups):
            assert group.register(f"rank{rank}") is group
            assert group.group_name == f"{group.getBackendName()}:rank{rank}"

        def do(group: ProcessGroup, rank: int) -> Any:
            plain, sent = own(rank), own(rank)
            dist.all_reduce(plain, group=group)
            dist.broadcast(sent, src=1, group=group)
            gathered = torch.zeros(4)
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, own(rank), group=group)
            dist.barrier(group=group)
            return [
                plain,
                sent,
                gathered,
                wait_tensor(functional.all_reduce(own(rank), "sum", group)),
                wait_tensor(functional.broadcast(own(rank), 1, group)),
            ]

        expected = [[3.0] * 2, [2.0] * 2, [1.0, 1.0, 2.0, 2.0], [3.0] * 2, [2.0] * 2]
        assert values(on_all(groups, do)) == [expected] * 2
        configure_all(groups, store.fresh())  # stays registered
        assert values(on_all(groups, do)) == [expected] * 2

        with pytest.raises(UsageError, match="registered already"):
            groups[0].register("again")
        other = groups[0].sibling()
        with pytest.raises(ConfigError, match="rank0"):
            other.register("rank0")
        groups[0].unregister()
        groups[0].unregister()
        other.register("rank0")
        other.shutdown()
