"""Calls as plain values, and back; who counts as frozen."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions
from torch.distributed import ReduceOp

from ft_core.errors import NotAvailableError
from ft_core.process_group.baby.collectives import Role, flatten, longest_timeout_s, outputs, rebuild
from ft_core.process_group.baby.work import overdue_at


def test_a_call_survives_the_way() -> None:
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    opts = BroadcastOptions()
    opts.rootRank = 7
    opts.timeout = timedelta(seconds=9)
    call, tensors = flatten("allgather", ([[first, second]], [third], opts))
    assert [id(tensor) for tensor in tensors] == [id(first), id(second), id(third)]
    assert call.roles == (Role.WRITTEN, Role.WRITTEN, Role.READ)
    again = rebuild(pickle.loads(pickle.dumps(call)), tensors.__getitem__)
    assert again[0][0][1] is second
    assert again[1][0] is third
    assert (again[2].rootRank, again[2].timeout) == (7, timedelta(seconds=9))


def test_the_operation_travels() -> None:
    opts = AllreduceOptions()
    opts.reduceOp = ReduceOp(ReduceOp.BXOR)
    call, tensors = flatten("allreduce", ([torch.zeros(1)], opts))
    assert rebuild(pickle.loads(pickle.dumps(call)), tensors.__getitem__)[1].reduceOp == ReduceOp.BXOR
    assert call.roles == (Role.BOTH,)


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(NotAvailableError, match="alltoall_of_tomorrow"):
        flatten("alltoall_of_tomorrow", ())


def test_results_have_the_form_of_torchs_works() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert outputs("barrier", (None,)) == []
    assert [id(each) for each in outputs("allreduce", ([one, two],))] == [id(one), id(two)]
    assert [id(each) for each in outputs("_allgather_base", (one, two))] == [id(one)]
    assert [id(each) for each in outputs("allgather", ([[one, two]], [two]))] == [id(one), id(two)]
    assert [len(each) for each in outputs("allgather_coalesced", ([[one], [two]], [two]))] == [1, 1]


def test_a_longer_timeout_of_one_collective_counts() -> None:
    opts = AllreduceOptions()
    assert longest_timeout_s(([torch.zeros(1)], opts), 20.0) == 20.0
    opts.timeout = timedelta(seconds=90)
    assert longest_timeout_s(([torch.zeros(1)], opts), 20.0) == 90.0


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e3))
def test_a_report_or_a_launch_gives_the_whole_time_again(
    launch: float, report: float, timeout_s: float, grace_s: float
) -> None:
    at = overdue_at(launch, report, timeout_s, grace_s)
    assert at >= launch + timeout_s
    assert at >= report + timeout_s
    assert at == overdue_at(report, launch, timeout_s, grace_s)
