"""The groups that stand around, or in for, a real one."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import ft_core.process_group as process_group
from ft_core.errors import CollectiveError, ConfigError
from ft_core.process_group import (
    DoneWork,
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from tests.process_group.fake_communicator import FakeNCCL
from tests.process_group.ranks import Store, configure_all, in_threads


def test_every_public_name_is_there() -> None:
    for name in process_group.__all__:
        assert getattr(process_group, name) is not None


def test_the_dummy_behaves_like_a_group_of_equal_ranks() -> None:
    dummy = ProcessGroupDummy()
    dummy.configure("", "replica0", 1, 2)
    assert (dummy.rank(), dummy.size(), dummy.configure_count) == (1, 2, 1)
    tensor = torch.ones(2)
    work = dummy.allreduce([tensor])
    assert work.wait()
    assert work.get_future().wait() == [tensor]
    outputs = [torch.zeros(2), torch.zeros(2)]
    dummy.allgather([outputs], [tensor]).wait()
    assert [output.tolist() for output in outputs] == [[1.0, 1.0]] * 2
    whole = torch.zeros(4)
    dummy._allgather_base(whole, tensor).wait()
    assert whole.tolist() == [1.0] * 4
    dummy.allgather_into_tensor_coalesced([whole], [tensor * 2]).wait()
    assert whole.tolist() == [2.0] * 4
    part = torch.zeros(2)
    dummy.reduce_scatter([part], [[tensor, tensor * 3]]).wait()
    assert part.tolist() == [3.0] * 2
    dummy._reduce_scatter_base(part, torch.arange(4.0)).wait()
    assert part.tolist() == [2.0, 3.0]
    dummy.alltoall([part], [tensor]).wait()
    dummy.allgather_coalesced([[part], [part]], [tensor * 5]).wait()
    assert part.tolist() == [5.0] * 2
    for other in (dummy.barrier(), dummy.broadcast([tensor]), dummy.send([tensor], 0), dummy.recv([tensor], 0)):
        assert other.wait()


def test_the_dummy_can_be_aborted_and_configured_again() -> None:
    dummy = ProcessGroupDummy(0, 2)
    dummy.set_timeout(timedelta(seconds=1))
    dummy.abort()
    assert repr(dummy) == "ProcessGroupDummy(rank 0 of 2, aborted)"
    with pytest.raises(CollectiveError):
        dummy.barrier()
    dummy.configure("", "replica0", 0, 1)
    dummy.barrier()
    assert dummy.errored() is None
    assert dummy.sibling().size() == 1
    dummy.shutdown()
    with pytest.raises(ConfigError, match="rank=2"):
        dummy.configure("", "replica0", 2, 2)
    with pytest.raises(ConfigError, match="world=1"):
        ProcessGroupDummy(1, 1)


@pytest.mark.parametrize("kind", [ProcessGroupWrapper, ErrorSwallowingProcessGroupWrapper, FakeProcessGroupWrapper])
def test_a_wrapper_passes_everything_on(store: Store, kind: type[ProcessGroupWrapper]) -> None:
    groups = [kind(ProcessGroupGloo(timedelta(seconds=20))) for _ in range(2)]
    configure_all(groups, store.fresh())
    assert repr(groups[0]).startswith(f"{kind.__name__}(ProcessGroupGloo(rank 0 of 2")
    assert [(group.rank(), group.size(), group.getBackendName()) for group in groups] == [
        (0, 2, "ft-gloo"),
        (1, 2, "ft-gloo"),
    ]

    def do(rank: int) -> list[float]:
        tensor, gathered = torch.ones(2), torch.zeros(2)
        groups[rank].allreduce([tensor], ReduceOp.SUM).wait()
        groups[rank].all_gather_single(gathered, torch.tensor([float(rank)])).wait()
        future = groups[rank].allreduce([tensor]).get_future()
        return [*future.wait()[0].tolist(), *gathered.tolist()]

    assert in_threads(2, do) == [[4.0, 4.0, 0.0, 1.0]] * 2
    assert groups[0].errored() is None
    assert isinstance(groups[0].parent, ProcessGroupGloo)
    sibling = groups[0].sibling()
    assert type(sibling) is kind
    groups[0].set_timeout(timedelta(seconds=3))
    groups[0].abort()
    assert isinstance(groups[0].errored(), CollectiveError)
    for group in groups:
        group.shutdown()


def test_swallowing_keeps_the_error_and_skips_the_rest(store: Store) -> None:
    inner = [ProcessGroupGloo(timedelta(seconds=20)) for _ in range(2)]
    configure_all(inner, store.fresh())
    group = ErrorSwallowingProcessGroupWrapper(inner[0])
    with pytest.raises(ConfigError):
        group.allreduce([torch.ones(1)], ReduceOp.AVG)
    first, second = torch.ones(1000), torch.ones(1000)
    work, other = group.allreduce([first]), group.allreduce([second])
    future = other.get_future()
    inner[1].abort()
    assert work.wait()
    assert future.wait() == [second]
    assert work.is_success()
    assert work.result() == [first]
    assert isinstance(group.error(), CollectiveError)
    assert group.errored() is group.error()
    assert isinstance(group.allreduce([first]), DoneWork)
    assert group.barrier().wait()
    group.configure("", "replica0", 0, 1)
    assert group.error() is None
    inner[0].abort()
    assert group.allreduce([first]).wait()
    assert isinstance(group.error(), CollectiveError)
    for each in inner:
        each.shutdown()


def test_the_managed_group_is_of_the_kind_of_the_managers_from_when_there_is_one() -> None:
    hooks = SimpleNamespace(process_group=None)
    manager: Any = SimpleNamespace(hooks=hooks)
    group = ManagedProcessGroup(manager)
    assert (group.blocks_host, group.torch_backend, group.torch_device_type) == (True, "gloo", "cpu")
    hooks.process_group = FakeNCCL(device="cuda:0")
    assert (group.blocks_host, group.torch_backend, group.torch_device_type) == (False, "nccl", "cuda")
    assert group.carries_cpu_memory, "beside that group"


def test_the_fake_fails_once_each_on_command() -> None:
    group = FakeProcessGroupWrapper(ProcessGroupDummy())
    group.report_configure_error(RuntimeError("no configure"))
    with pytest.raises(RuntimeError, match="no configure"):
        group.configure("", "replica0", 0, 1)
    group.configure("", "replica0", 0, 1)
    group.report_future_error(RuntimeError("no result"))
    work = group.allreduce([torch.ones(1)])
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match="no result"):
        work.wait()
    with pytest.raises(RuntimeError, match="no result"):
        work.get_future().wait()
    assert str(group.errored()) == "no result"
    assert group.allreduce([torch.ones(1)]).wait()
    group.configure("", "replica0", 0, 1)
    assert group.errored() is None
