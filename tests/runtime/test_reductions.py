"""Reductions of the script's own over real Managers: members that do not take part change nothing in any of them."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ft_core.errors import ConfigError, NotAvailableError, UsageError
from ft_core.process_group import ManagedProcessGroup
from ft_core.runtime.reduce_operations import name_of, neutral_element
from tests.runtime.harness import Cluster, Replica

OPS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}
ON_INTEGERS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
ON_FLOATS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
CASES = [
    *itertools.product((torch.int32, torch.int64, torch.uint8), ON_INTEGERS),
    *itertools.product((torch.float32, torch.float64, torch.bfloat16), ON_FLOATS),
    *((torch.bool, name) for name in ("MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")),
    *((torch.complex64, name) for name in ("SUM", "AVG")),
]
VALUES = ([3, 5, 0], [9, 1, 1], [6, 2, 1])
"""What each replica reduces."""


def tensor_of(index: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor(VALUES[index])
    if dtype.is_complex or dtype.is_floating_point:
        values = -values  # a zero of somebody who does not take part would be the maximum
    return values.to(dtype)


def reduced(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if name in ("SUM", "AVG"):
        total = sum(parts[1:], parts[0])
        return total / len(parts) if name == "AVG" else total
    combine: Any = {
        "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
    }[name]  # fmt: skip
    result = parts[0]
    for part in parts[1:]:
        result = combine(result, part)
    return result


class Reduces(Replica):
    """One attempt in which it reduces all CASES; replica `left_out` reports an error first, so that it adds nothing."""

    left_out = -1

    def wrap(self) -> None: ...

    def train(self) -> None:
        manager = self.manager
        manager.start_quorum()
        if self.index == self.left_out:
            manager.report_error(RuntimeError("NaN"))
        self.results = [tensor_of(self.index, dtype) for dtype, _ in CASES]
        for tensor, (_, name) in zip(self.results, CASES, strict=True):
            manager.allreduce(tensor, reduce_op=OPS[name]).wait()
        self.committed = manager.should_commit()


@pytest.mark.parametrize("left_out", [-1, 0, 2])
def test_every_operation_leaves_out_who_does_not_take_part(cluster: Cluster, left_out: int) -> None:
    replicas = [Reduces(i) for i in range(3)]
    for replica in replicas:
        replica.left_out = left_out
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None] * 3
    assert [r.committed for r in replicas] == [left_out < 0] * 3
    for number, (dtype, name) in enumerate(CASES):
        parts = [tensor_of(i, dtype) for i in range(3) if i != left_out]
        expected = reduced(name, parts)
        if name == "AVG":  # divided by those who were planned
            expected = expected * len(parts) / 3
        for replica in replicas:
            got = replica.results[number]
            assert (
                torch.allclose(got, expected, rtol=1e-2) if dtype.is_floating_point else torch.equal(got, expected)
            ), (replica.name, dtype, name, got, expected)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool, torch.float16, torch.float64])
def test_a_neutral_element_changes_nothing(name: str, dtype: torch.dtype) -> None:
    try:
        assert name_of(OPS[name], dtype) == name
    except ConfigError:
        return
    x = torch.tensor([0, 1, 0, 1] if dtype == torch.bool else [0, 1, 7, 100]).to(dtype)
    neutral = torch.empty_like(x).fill_(neutral_element(name, dtype))
    parts = [x, neutral] if name != "AVG" else [x + neutral]
    assert torch.equal(reduced(name, parts), x)


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("AVG", torch.int64, "use SUM"), ("MAX", torch.complex64, "view_as_real"), ("PRODUCT", torch.complex64, "SUM"),
        ("BAND", torch.float32, "integers or bool"), ("BXOR", torch.bfloat16, "integers or bool"),
    ],
)  # fmt: skip
def test_what_is_not_defined_for_a_dtype_is_refused(name: str, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        name_of(OPS[name], dtype)


def test_an_operation_without_a_rule_is_refused() -> None:
    premultiplied: Any = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
    with pytest.raises(ConfigError, match="no rule"):
        name_of(premultiplied, torch.float32)


class Weightless(Reduces):
    def train(self) -> None:
        self.manager.start_quorum()
        self.manager.set_batch_weight(4 * self.index)
        self.results = [torch.tensor([float(self.index + 1)]) for _ in range(2)]
        self.manager.allreduce(self.results[0], reduce_op=ReduceOp.SUM)
        self.manager.allreduce(self.results[1])
        self.committed = self.manager.should_commit()


def test_a_sum_takes_a_participant_whose_weight_is_zero_an_average_does_not(cluster: Cluster) -> None:
    replicas = [Weightless(i) for i in range(2)]
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None] * 2
    assert [[t.item() for t in r.results] for r in replicas] == [[3.0, 2.0]] * 2


class Unusual(Reduces):
    """What a group would take for something else, or fail on, is refused where it was given, and costs no step."""

    def train(self) -> None:
        self.manager.start_quorum()
        refused = [
            (torch.arange(8.0)[::2], "not contiguous"),
            (torch.ones(1).expand(1 << 20), "not contiguous"),
            (torch.tensor([1 + 2j]).conj(), "resolve_conj"),
            (torch.ones(2, dtype=torch.int16), "Gloo carries no tensors of torch.int16"),
            ([1.0, 2.0], r"tensor=\[1.0, 2.0\]: allreduce reduces a torch.Tensor"),
        ]
        for tensor, words in refused:
            with pytest.raises(ConfigError, match=words):
                self.manager.allreduce(tensor, reduce_op=ReduceOp.SUM)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="torch does not compute in"):
            self.manager.allreduce(torch.ones(2).to(torch.float8_e5m2))
        self.manager.set_batch_weight(1 + self.index)
        values = torch.full((2, 3), 6.0 * self.index)
        with torch.inference_mode():
            loss = values.clone()
        self.results = [torch.nn.Parameter(values.clone()), loss, values.clone().t()]
        for tensor in self.results:
            self.manager.allreduce(tensor)
        self.committed = self.manager.should_commit()


def test_parameters_and_results_of_a_validation_are_averaged_and_a_mistake_costs_no_step(cluster: Cluster) -> None:
    replicas = [Unusual(i) for i in range(2)]
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None] * 2
    assert [r.committed for r in replicas] == [True] * 2
    assert [[t.flatten().tolist() for t in r.results] for r in replicas] == [[[4.0] * 6] * 3] * 2


# ------------------------------------------------------------ ManagedProcessGroup


_registering = threading.Lock()
"""torch's tables of groups are the process's."""


class ThroughTorch(Reduces):
    def train(self) -> None:
        manager = self.manager
        manager.start_quorum()
        manager.wait_quorum()
        with _registering:
            group: Any = ManagedProcessGroup(manager).register(self.name)
        self.size_and_rank = group.size(), group.rank()
        assert (group.blocks_host, group.torch_backend, group.torch_device_type) == (True, "gloo", "cpu")
        self.results = [torch.tensor([10.0 * (self.index + 1)]) for _ in range(3)]
        self.results += [torch.tensor([self.index + 1]), torch.tensor([5.0 + self.index]), torch.tensor([6.0])]
        for tensor, op in zip(self.results[:3], (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX), strict=True):
            dist.all_reduce(tensor, op=op, group=group)
        dist.all_reduce(self.results[3], group=group)
        group.allreduce_coalesced(self.results[4:]).wait()
        with pytest.raises(ConfigError, match="use SUM"):
            dist.all_reduce(torch.tensor([1]), op=ReduceOp.AVG, group=group)
        with pytest.raises(NotAvailableError, match="broadcast"):
            group.broadcast([self.results[0]])
        refused = (group.abort, lambda: group.set_timeout(timedelta(seconds=1)), lambda: group.configure("", "r", 0, 1))
        for call in refused:
            with pytest.raises(UsageError):
                call()
        assert group.errored() is None
        self.committed = manager.should_commit()
        manager.report_error(ValueError("lost"))
        assert isinstance(group.errored(), ValueError)
        assert repr(group) == f"ManagedProcessGroup({manager!r})"
        with _registering:
            group.shutdown()


def test_a_sum_over_the_managed_group_is_a_sum(cluster: Cluster) -> None:
    replicas = [ThroughTorch(i) for i in range(2)]
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None] * 2
    assert [r.size_and_rank for r in replicas] == [(2, 0), (2, 1)]
    assert [[t.item() for t in r.results] for r in replicas] == [[30.0, 15.0, 20.0, 3, 11.0, 12.0]] * 2
    assert [r.committed for r in replicas] == [True, True]


def test_several_are_checked_before_the_first_is_launched(cluster: Cluster) -> None:
    """By what is in them, too: the average of the first is defined, that of the second is not."""

    def refused(replica: Replica) -> None:
        manager, fine, wrong = replica.manager, torch.ones(2), torch.ones(2, dtype=torch.int64)
        for op, of in ((ReduceOp.AVG, [fine, wrong]), (ReduceOp.BAND, [wrong, fine])):
            with pytest.raises(ConfigError, match="reduce_op="):
                ManagedProcessGroup(manager).allreduce_coalesced(of, op)
        assert (fine.tolist(), wrong.tolist()) == ([1.0, 1.0], [1, 1])
        assert repr(manager._runtime.shell.works) == "UserWorks(0 collectives, 0 futures)"

    replicas = [Replica(0, at={(2, "forward"): refused}), Replica(1)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    assert [replica.vetoes for replica in replicas] == [[], []]
