"""The Manager's public calls, one by one: arguments, environment, refusals, and what each promises."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core import DistributedDataParallel, Manager, ProcessGroupGloo
from ft_core.errors import ConfigError, JobFinishedError, LighthouseError, QuorumTimeoutError, RefusedError, UsageError
from ft_core.manager import WorldSizeMode
from ft_core.process_group import ProcessGroupDummy
from ft_core.protocol.pushes import Order, Refusal
from ft_core.runtime import config as setup
from tests.runtime.harness import LIMIT_S, Cluster, Replica, crash, mlp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.runtime.loopback import Loopback


def arguments(**changes: Any) -> setup.Arguments:
    values: dict[str, Any] = dict.fromkeys(setup.Arguments.__dataclass_fields__)
    values |= {"world_size_mode": WorldSizeMode.DYNAMIC, "init_sync": True, "parity_check_every": 0}
    values |= {"parity_sample_steps": 1000}
    return setup.Arguments(**(values | {"lighthouse_addr": "h:1", "hostname": "127.0.0.1"} | changes))


def resolve(env: Mapping[str, str] | None = None, **changes: Any) -> setup.Config:
    return setup.resolve(arguments(**changes), env or {})


# ------------------------------------------------------------ arguments and environment


@pytest.mark.parametrize(
    ("env", "changes", "field", "value"),
    [
        ({"FT_LIGHTHOUSE": "a:1"}, {"lighthouse_addr": None}, "lighthouse", "a:1"),
        ({"TORCHFT_LIGHTHOUSE": "http://b:2"}, {"lighthouse_addr": None}, "lighthouse", "http://b:2"),
        ({"FT_LIGHTHOUSE": "a:1", "TORCHFT_LIGHTHOUSE": "b:2"}, {"lighthouse_addr": None}, "lighthouse", "a:1"),
        ({"FT_LIGHTHOUSE": "a:1"}, {"lighthouse_addr": "c:3"}, "lighthouse", "c:3"),
        ({"FT_LIGHTHOUSE": "a:1,b:2"}, {"lighthouse_addr": None}, "lighthouse", "a:1,b:2"),
        (
            {"TORCHFT_LIGHTHOUSE": "http://a:1,http://b:2"},
            {"lighthouse_addr": None},
            "lighthouse",
            "http://a:1,http://b:2",
        ),
        ({"FT_FROM_SCRATCH": "1"}, {}, "from_scratch", True),
        ({"FT_FROM_SCRATCH": "1"}, {"from_scratch": False}, "from_scratch", False),
        ({}, {"from_scratch": True}, "from_scratch", True),
        ({"FT_REPLICA_ID": "x"}, {}, "name", "x"),
        ({"FT_REPLICA_ID": "x"}, {"replica_id": "y"}, "name", "y"),
        ({"FT_REPLICA_GROUP": "4"}, {}, "name", "replica-4"),
        ({"REPLICA_GROUP_ID": "4"}, {}, "name", "replica-4"),
        ({"FT_REPLICA_GROUP": "3", "REPLICA_GROUP_ID": "4"}, {}, "name", "replica-3"),
        ({"FT_NUM_REPLICA_GROUPS": "4"}, {}, "expected", 4),
        ({"NUM_REPLICA_GROUPS": "4"}, {}, "expected", 4),
        ({"FT_NUM_REPLICA_GROUPS": "3", "NUM_REPLICA_GROUPS": "4"}, {}, "expected", 3),
        ({"FT_NUM_REPLICA_GROUPS": "4"}, {"expected_replicas": 3}, "expected", 3),
        ({"FT_MANAGER_PORT": "4"}, {}, "port", 4),
        ({"TORCHFT_MANAGER_PORT": "5"}, {}, "port", 5),
        ({"TORCHFT_MANAGER_PORT": "5"}, {"port": 6}, "port", 6),
        ({"FT_TOKEN": "s"}, {}, "token", "s"),
        ({"FT_TOKEN": "s"}, {"token": "t"}, "token", "t"),
        ({"TORCHFT_QUORUM_RETRIES": "3"}, {}, "quorum_retries", 3),
        ({"TORCHFT_QUORUM_RETRIES": "3"}, {"quorum_retries": 0}, "quorum_retries", 0),
        ({"MASTER_ADDR": "m", "MASTER_PORT": "7"}, {}, "store", ("m", 7)),
        ({"MASTER_ADDR": "m", "MASTER_PORT": "7"}, {"store_addr": "n", "store_port": 8}, "store", ("n", 8)),
        ({"FT_HOSTNAME": "n1", "FT_TOKEN": "s"}, {"hostname": None}, "host", "n1"),
        ({}, {"hostname": None, "lighthouse_addr": "localhost:1"}, "host", "127.0.0.1"),
        ({}, {"hostname": None, "lighthouse_addr": "http://[::1]:1"}, "host", "::1"),
        ({}, {"hostname": None, "lighthouse_addr": "http://[::1]:1"}, "bind", "::1"),
        ({"FT_TOKEN": "s"}, {"hostname": "10.0.0.1"}, "bind", ""),
        ({"FT_INSECURE": "1"}, {"hostname": "10.0.0.1"}, "bind", ""),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "7"},
            {"hostname": None, "lighthouse_addr": None},
            "host",
            "127.0.0.1",
        ),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, {"replica_id": "x"}, "incarnation_key", "ft_core/x/3"),
        (
            {"TORCHELASTIC_RESTART_COUNT": "0", "FT_GROUP_ATTEMPT": "f00"},
            {"replica_id": "x"},
            "incarnation_key",
            "ft_core/x/f00",
        ),
        ({}, {}, "rank", 0),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "7"}, {}, "rank", 1),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "7"}, {"rank": 0}, "rank", 0),
    ],
)
def test_environment_and_arguments(env: dict[str, str], changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(resolve(env, **changes), field) == value


@pytest.mark.parametrize(
    ("env", "changes", "field", "value"),
    [
        ({}, {}, "timeout_s", 60.0),
        ({"FT_TIMEOUT_S": "5"}, {}, "timeout_s", 5.0),
        ({"TORCHFT_TIMEOUT_SEC": "6"}, {}, "timeout_s", 6.0),
        ({"TORCHFT_TIMEOUT_SEC": "6"}, {"timeout": timedelta(seconds=7)}, "timeout_s", 7.0),
        ({"TORCHFT_QUORUM_TIMEOUT_SEC": "8"}, {}, "quorum_s", 8.0),
        ({"TORCHFT_QUORUM_TIMEOUT_SEC": "8"}, {"quorum_timeout": timedelta(seconds=9)}, "quorum_s", 9.0),
        ({"TORCHFT_CONNECT_TIMEOUT_SEC": "10"}, {}, "connect_s", 10.0),
        ({}, {"connect_timeout": timedelta(seconds=11)}, "connect_s", 11.0),
        ({"FT_LIVENESS_S": "1"}, {}, "liveness_s", 1.0),
        ({"FT_LIVENESS_S": "1"}, {"time_overrides": {"liveness_s": 2.0}}, "liveness_s", 2.0),
    ],
)
def test_times(env: dict[str, str], changes: dict[str, Any], field: str, value: float) -> None:
    assert getattr(resolve(env, **changes).budget, field) == value


@pytest.mark.parametrize(
    ("env", "changes", "words"),
    [
        ({}, {"lighthouse_addr": None}, ["lighthouse_addr", "FT_LIGHTHOUSE", "ft-lighthouse"]),
        ({}, {"lighthouse_addr": "nonsense"}, ["lighthouse_addr", "'nonsense'", "host:port"]),
        ({"FT_LIGHTHOUSE": "host:port"}, {"lighthouse_addr": None}, ["FT_LIGHTHOUSE", "'host:port'"]),
        ({}, {"lighthouse_addr": "h:70000"}, ["70000"]),
        ({}, {"lighthouse_addr": "a:1,b:1,c:1"}, ["lighthouse_addr='a:1,b:1,c:1' names 3 lighthouses"]),
        ({"FT_LIGHTHOUSE": "a:1,"}, {"lighthouse_addr": None}, ["FT_LIGHTHOUSE='a:1,': an address is missing"]),
        ({}, {"lighthouse_addr": "a:1,https://h:1"}, ["lighthouse_addr='https://h:1' asks for TLS"]),
        ({}, {"lighthouse_addr": "https://h:1"}, ["lighthouse_addr='https://h:1' asks for TLS", "set FT_TLS_CA"]),
        ({"FT_LIGHTHOUSE": "grpcs://h:1"}, {"lighthouse_addr": None}, ["FT_LIGHTHOUSE='grpcs://h:1' asks for TLS"]),
        ({"FT_TLS_CERT": "/c"}, {}, ["FT_TLS_CERT is set and FT_TLS_KEY is not", "set FT_TLS_KEY"]),
        ({"FT_TLS_CA": "/c"}, {}, ["FT_TLS_CA='/c' alone", "set FT_TLS_CERT and FT_TLS_KEY too"]),
        ({}, {"hostname": "10.0.0.1"}, ["reach this replica at '10.0.0.1' (FT_HOSTNAME)", "FT_TOKEN", "FT_INSECURE=1"]),
        ({"FT_INSECURE": "yes"}, {"hostname": "10.0.0.1"}, ["FT_INSECURE='yes' must be 1"]),
        ({}, {"min_replica_size": 0}, ["min_replica_size=0", "1"]),
        ({"FT_NUM_REPLICA_GROUPS": "2"}, {"min_replica_size": 3}, ["min_replica_size=3", "FT_NUM_REPLICA_GROUPS"]),
        ({"FT_MIN_REPLICAS": "x"}, {}, ["FT_MIN_REPLICAS='x'", "whole number"]),
        ({"RANK": "one"}, {}, ["RANK='one'"]),
        ({}, {"rank": 2, "world_size": 2}, ["rank=2", "world_size=2"]),
        ({}, {"rank": 0, "world_size": 2}, ["store_addr", "MASTER_ADDR"]),
        ({}, {"max_retries": -1}, ["max_retries=-1"]),
        ({}, {"quorum_retries": -1}, ["quorum_retries=-1"]),
        ({}, {"parity_check_every": -1}, ["parity_check_every=-1"]),
        ({}, {"parity_sample_steps": -1}, ["parity_sample_steps=-1"]),
        ({}, {"timeout": 5}, ["timeout=5", "timedelta"]),
        ({}, {"timeout": timedelta(0)}, ["timeout=0.0"]),
        ({}, {"time_overrides": {"livenes_s": 1.0}}, ["livenes_s", "liveness_s"]),
        ({}, {"time_overrides": {"autonomy_s": 2000.0}}, ["autonomy_s", "orphan_s"]),
        ({"FT_LIVENESS_S": "100"}, {}, ["liveness_s=100", "timeout_s=60"]),
    ],
)
def test_refusals_name_the_setting_the_value_and_what_to_do(env: Any, changes: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(env, **changes)
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_unknown_variable_is_warned_about_with_the_nearest_name() -> None:
    with pytest.warns(UserWarning, match="FT_LIGHTHOSE.*FT_LIGHTHOUSE"):
        resolve({"FT_LIGHTHOSE": "a:1"})


# ------------------------------------------------------------ construction


def make(**options: Any) -> Manager:
    values: dict[str, Any] = {
        "min_replica_size": 1, "timeout": timedelta(seconds=5), "lighthouse_addr": "h:1", "hostname": "127.0.0.1",
        "replica_id": "solo",
    }  # fmt: skip
    return Manager(**({"pg": ProcessGroupGloo(hostname="127.0.0.1")} | values | options))


@pytest.mark.usefixtures("lighthouse")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pg": object()}, "ProcessGroup"),
        ({"state_dict": dict}, "both load_state_dict and state_dict"),
        ({"state_dict": dict, "load_state_dict": 3}, "callable"),
    ],
)
def test_construction_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**options)


@pytest.mark.usefixtures("lighthouse")
def test_a_store_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"store_addr='127.0.0.1' store_port=1 .*MASTER_ADDR"):
        make(store_addr="127.0.0.1", store_port=1, connect_timeout=timedelta(seconds=1))


@pytest.fixture
def manager(lighthouse: Loopback) -> Any:
    manager = make()
    yield manager
    manager.shutdown()


def test_keys_of_state_functions_are_unique(manager: Manager) -> None:
    manager.register_state_dict_fn("a", lambda _: None, dict)
    with pytest.raises(ConfigError, match="'a' are already registered"):
        manager.register_state_dict_fn("a", lambda _: None, dict)
    manager.set_state_dict_fns(lambda _: None, dict)
    with pytest.raises(ConfigError, match="'default' are already registered"):
        manager.set_state_dict_fns(lambda _: None, dict)


def test_calls_in_an_order_that_cannot_work(manager: Manager) -> None:
    for call in (manager.should_commit, manager.wait_quorum, lambda: manager.allreduce(torch.zeros(1))):
        with pytest.raises(UsageError, match="before start_quorum"):
            call()
    manager.start_quorum()
    with pytest.raises(UsageError, match="before the first start_quorum"):
        DistributedDataParallel(manager, mlp())
    with pytest.raises(UsageError, match="load_state_dict after the first start_quorum"):
        manager.load_state_dict({"step": 1, "batches_committed": 1})
    manager.shutdown()
    with pytest.raises(UsageError, match="after shutdown"):
        manager.start_quorum()


def test_a_checkpoint_of_the_manager(manager: Manager) -> None:
    with pytest.raises(ConfigError, match="batches_committed"):
        manager.load_state_dict({"step": 1})
    manager.load_state_dict({"step": 7, "batches_committed": 21})  # as the reference implementation writes it
    assert manager.current_step() == 7
    assert manager.batches_committed() == 21
    assert manager.state_dict().items() >= {"step": 7, "batches_committed": 21}.items()
    manager.start_quorum()
    assert manager.should_commit()
    assert manager.current_step() == 8
    assert manager.batches_committed() == 22


def test_all_who_load_the_same_checkpoint_start_without_healing(cluster: Cluster) -> None:
    def resume(replica: Replica) -> None:
        replica.wrap()
        replica.manager.load_state_dict({"step": 3, "batches_committed": 6})

    class Counting(Replica):
        loads = 0

        def load_state_dict(self, state: Any) -> None:
            self.loads += 1
            super().load_state_dict(state)

    replicas = [Counting(i, seed=3, setup=resume) for i in range(2)]
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None, None]
    assert [[c.step for c in r.commits] for r in replicas] == [[4, 5, 6]] * 2
    assert [r.loads for r in replicas] == [0, 0]


def test_a_stale_checkpoint_heals_to_the_newest(cluster: Cluster) -> None:
    def resume(step: int) -> Any:
        def act(replica: Replica) -> None:
            replica.wrap()
            replica.manager.load_state_dict({"step": step, "batches_committed": step})

        return act

    cluster.run(Replica(0, setup=resume(3)), Replica(1, setup=resume(2)))
    cluster.check()
    assert [[c.step for c in r.commits] for r in cluster.replicas] == [[4, 5, 6]] * 2
    assert [c.participated for c in cluster.replicas[1].commits] == [True] * 3


# ------------------------------------------------------------ one replica


def test_a_step_alone(manager: Manager) -> None:
    assert manager.errored() is None
    manager.start_quorum()
    manager.wait_quorum()
    assert (manager.num_participants(), manager.participating_rank(), manager.is_participating()) == (1, 0, True)
    assert manager.should_commit()
    assert (manager.current_step(), manager.batches_committed()) == (1, 1)
    assert manager.stable_step() == 0
    assert "step 1" in repr(manager)


def test_several_votes_in_one_quorum(manager: Manager) -> None:
    manager.start_quorum()
    assert [manager.should_commit() for _ in range(3)] == [True, True, True]
    assert manager.current_step() == 3


def test_a_step_that_is_not_voted_on(manager: Manager) -> None:
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    manager.start_quorum()
    assert manager.should_commit()
    assert manager.current_step() == 1


def test_errors_are_of_one_attempt(manager: Manager) -> None:
    manager.start_quorum()
    error = ValueError("NaN")
    manager.report_error(error)
    manager.report_error(ValueError("the second"))
    assert manager.errored() is error
    assert not manager.should_commit()
    manager.start_quorum()
    assert manager.errored() is None
    assert manager.should_commit()


def test_an_error_of_a_step_that_was_never_voted_on_is_forgotten(manager: Manager) -> None:
    manager.start_quorum()
    manager.report_error(ValueError("skipped batch"))
    manager.start_quorum()
    assert manager.errored() is None
    assert manager.should_commit()


def test_max_retries(lighthouse: Loopback) -> None:
    manager = make(max_retries=2)
    for _ in range(2):
        manager.start_quorum()
        manager.report_error(ValueError("again"))
        assert not manager.should_commit()
    manager.start_quorum()
    manager.report_error(ValueError("again"))
    with pytest.raises(RuntimeError, match="max_retries=2"):
        manager.should_commit()
    manager.shutdown()


def test_a_commit_resets_the_retries(lighthouse: Loopback) -> None:
    manager = make(max_retries=1)
    for step in range(4):
        manager.start_quorum()
        if step % 2 == 0:
            manager.report_error(ValueError("every other time"))
        assert manager.should_commit() == (step % 2 == 1)
    manager.shutdown()


def test_wrap_future(manager: Manager) -> None:
    manager.start_quorum()
    good: Future[int] = Future()
    wrapped = manager.wrap_future(good, -1)
    good.set_result(5)
    assert wrapped.wait() == 5
    assert manager.errored() is None
    bad: Future[int] = Future()
    wrapped = manager.wrap_future(bad, -1)
    bad.set_exception(ValueError("lost"))  # type: ignore[arg-type]
    assert wrapped.wait() == -1
    assert "lost" in str(manager.errored())
    assert not manager.should_commit()
    manager.start_quorum()
    assert manager.wrap_future(Future(), -2, timeout=timedelta(milliseconds=10)).wait() == -2
    assert not manager.should_commit()


def test_allreduce_refuses(manager: Manager) -> None:
    manager.start_quorum()
    with pytest.raises(ConfigError, match=r"AVG needs a floating point tensor, got torch[.]int64"):
        manager.allreduce(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="should_quantize"):
        manager.allreduce(torch.ones(2), should_quantize=True)
    assert manager.should_commit()


def test_reading_state_is_held_off(lighthouse: Loopback) -> None:
    manager = make(timeout=timedelta(seconds=0.5))
    manager.register_state_dict_fn("x", lambda _: None, lambda: {"t": torch.zeros(1)})
    manager.disallow_state_dict_read()
    allowed = threading.Timer(0.05, manager.allow_state_dict_read)
    allowed.start()
    manager.start_quorum()
    assert manager.should_commit()
    allowed.join()
    manager.shutdown()


def test_pause_refuses_nonsense(manager: Manager) -> None:
    with pytest.raises(ConfigError, match="max_s=0"), manager.pause("x", 0):
        pass


def test_finished_user_collectives_do_not_alarm_the_watchdog(lighthouse: Loopback) -> None:
    """Found by reading: an allreduce long done was taken for a hanging one after `timeout`."""
    manager = make(timeout=timedelta(seconds=0.4))
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    threading.Event().wait(0.6)  # the script computes for longer than the timeout
    assert manager.errored() is None
    assert manager.should_commit()
    manager.shutdown()


# ------------------------------------------------------------ several replicas


def step_with(act: Any) -> Any:
    """A loop of one attempt that does `act` between start_quorum and the vote, and keeps what it returns."""

    def loop(replica: Replica) -> None:
        replica.manager.start_quorum()
        replica.result = act(replica)  # type: ignore[attr-defined]
        replica.committed = replica.manager.should_commit()  # type: ignore[attr-defined]

    return loop


def bare(replica: Replica) -> None:
    """No wrapper."""


def test_allreduce_operations(cluster: Cluster) -> None:
    def act(replica: Replica) -> list[list[float]]:
        manager, mine = replica.manager, float(replica.index + 1)
        average, total, most = torch.full((2,), mine), torch.full((2,), int(mine)), torch.full((2,), mine)
        works = [
            manager.allreduce(average),
            manager.allreduce(total, reduce_op=ReduceOp.SUM),
            manager.allreduce(most, reduce_op=ReduceOp.MAX),
        ]
        assert works[0].wait() is average
        assert works[0].is_completed()
        assert works[1].get_future().wait() is total
        works[2].wait()
        assert works[2].wait() is most
        via_future = manager.allreduce(torch.full((1,), mine))
        assert via_future.value().item() == 2.0
        assert via_future.done()
        return [average.tolist(), total.tolist(), most.tolist()]

    cluster.run(*[Replica(i, setup=bare, loop=step_with(act)) for i in range(3)])
    assert [r.error for r in cluster.replicas] == [None] * 3
    assert [r.result for r in cluster.replicas] == [[[2.0, 2.0], [6, 6], [3.0, 3.0]]] * 3  # type: ignore[attr-defined]


def test_allreduce_beside_a_wrapped_model(cluster: Cluster) -> None:
    """On a lane of its own, before and after backward."""
    seen: list[float] = []

    def reduce(replica: Replica) -> None:
        value = torch.full((1,), float(replica.index))
        replica.manager.allreduce(value).wait()
        seen.append(value.item())

    replicas = [Replica(i, at={(1, "forward"): reduce, (2, "backward"): reduce}) for i in range(3)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    cluster.check_numbers()
    assert seen == [1.0] * 6


def test_a_soft_error_contributes_zeros_to_allreduce(cluster: Cluster) -> None:
    def act(replica: Replica) -> float:
        if replica.index == 1:
            replica.manager.report_error(ValueError("NaN"))
        value = torch.full((1,), 8.0 if replica.index == 0 else float("nan"))
        replica.manager.allreduce(value).wait()
        return value.item()

    cluster.run(*[Replica(i, setup=bare, loop=step_with(act)) for i in range(2)])
    assert [r.result for r in cluster.replicas] == [4.0, 4.0]  # type: ignore[attr-defined]
    assert [r.committed for r in cluster.replicas] == [False, False]  # type: ignore[attr-defined]


def test_allreduce_after_a_failure_returns_at_once(cluster: Cluster) -> None:
    def act(replica: Replica) -> str:
        manager = replica.manager
        if replica.index == 1:  # before the first has launched anything, it would go on alone, in the next quorum
            first = cluster.replicas[0].manager._runtime.rank
            cluster.lighthouse.wait_for(lambda: first.attempt.user_ops > 0)
            crash(replica)
        manager.wait_quorum()
        manager.allreduce(torch.ones(4)).wait()
        manager.allreduce(torch.ones(4)).wait()
        return str(manager.errored())

    cluster.run(*[Replica(i, setup=bare, loop=step_with(act)) for i in range(2)])
    first = cluster.replicas[0]
    assert first.error is None
    assert first.result != "None"  # type: ignore[attr-defined]
    assert first.committed is False  # type: ignore[attr-defined]


def test_a_skipped_allreduce_is_never_paired_with_another(cluster: Cluster) -> None:
    """The number of user collectives is in the fence's tag: the attempt is broken, not silently mixed."""

    def act(replica: Replica) -> None:
        if replica.index == 0:
            replica.manager.allreduce(torch.ones(1))

    replicas = [Replica(i, setup=bare, loop=step_with(act)) for i in range(2)]
    cluster.run(*replicas)
    assert [r.committed for r in replicas] == [False, False]  # type: ignore[attr-defined]


def test_min_replica_size_is_waited_for(cluster: Cluster) -> None:
    second = Replica(1, min_replica_size=2)
    reasons: list[str] = []

    def start_second() -> None:
        lighthouse = cluster.lighthouse
        lighthouse.wait_for(lambda: "min_replicas" in lighthouse.room.waits.reason)
        reasons.append(lighthouse.room.waits.reason)
        cluster.start(second)

    cluster.start(Replica(0, min_replica_size=2))
    start_second()
    cluster.join()
    cluster.check(steps=6)
    assert "1 of the 2 groups that min_replicas asks for" in reasons[0]


def test_no_quorum_in_time_says_why(lighthouse: Loopback) -> None:
    manager = make(min_replica_size=2, quorum_timeout=timedelta(seconds=0.1), quorum_retries=2)
    with pytest.raises(QuorumTimeoutError, match=r"min_replicas"):
        manager.start_quorum()
    with pytest.raises(QuorumTimeoutError, match=r"within 0.6 s"):
        manager.start_quorum(timeout=timedelta(seconds=0.2))
    manager.shutdown()


def test_a_quorum_can_be_had_after_a_timeout(cluster: Cluster) -> None:
    first = Replica(
        0, min_replica_size=2, quorum_timeout=timedelta(seconds=0.1), catch=QuorumTimeoutError, max_iterations=10_000
    )
    cluster.start(first)
    cluster.lighthouse.wait_for(lambda: first.caught)
    cluster.start(Replica(1, min_replica_size=2, quorum_timeout=timedelta(seconds=LIMIT_S)))
    cluster.join()
    cluster.check(steps=6)


def test_rooms_are_independent(cluster: Cluster) -> None:
    def loop(replica: Replica) -> None:
        room = "a" if replica.index < 2 else "b"
        for _ in range(3):
            replica.manager.start_quorum(room_id=room)
            replica.result = replica.manager.num_participants()  # type: ignore[attr-defined]
            assert replica.manager.should_commit()

    cluster.expected = 2
    cluster.start(*[Replica(i, setup=bare, loop=loop) for i in range(4)])
    cluster.join()
    assert [r.error for r in cluster.replicas] == [None] * 4
    assert [r.result for r in cluster.replicas] == [2] * 4  # type: ignore[attr-defined]


def test_changing_rooms(lighthouse: Loopback) -> None:
    manager = make()
    manager.start_quorum()
    assert manager.should_commit()
    manager.start_quorum(room_id="other")
    assert manager.should_commit()
    assert manager.current_step() == 2
    assert lighthouse.members() == ("solo",)
    assert lighthouse.members("other") == ("solo",)
    manager.shutdown()


def test_shrink_only_takes_nobody_in(cluster: Cluster) -> None:
    newcomer = Replica(1, steps=6)

    class Shrinks(Replica):
        def iteration(self) -> None:
            self.step = self.manager.current_step()
            self.at("boundary")
            self.manager.start_quorum(shrink_only=self.step < 10)
            self.inner.zero_grad()
            self.loss().backward()
            self.sizes.append(self.manager.num_participants())
            if self.manager.should_commit():
                self.inner.step()

        sizes: ClassVar[list[int]] = []

    first = Shrinks(0, steps=16, at={(2, "boundary"): cluster.joins(newcomer)})
    newcomer.steps = 16
    Shrinks.sizes = []
    cluster.run(first, expected=1)
    assert [r.error for r in cluster.replicas] == [None, None]
    assert 2 not in first.sizes[:10]
    assert newcomer.commits


def test_allow_heal_false_waits(cluster: Cluster) -> None:
    """A member behind the newest state contributes nothing and never commits."""

    def resume(replica: Replica) -> None:
        replica.wrap()
        if replica.index == 0:
            replica.manager.load_state_dict({"step": 3, "batches_committed": 3})

    class NoHeal(Replica):
        def iteration(self) -> None:
            self.manager.start_quorum(allow_heal=False)
            self.inner.zero_grad()
            self.loss().backward()
            participated = self.manager.is_participating()
            committed = self.manager.should_commit()
            if committed:
                self.inner.step()
            self.record(committed, participated)

    ahead = NoHeal(0, setup=resume)

    class Behind(NoHeal):
        def train(self) -> None:
            for _ in range(3):
                self.iteration()

    behind = Behind(1, setup=resume)
    cluster.run(ahead, behind)
    assert [r.error for r in cluster.replicas] == [None, None]
    assert [c.step for c in ahead.commits] == [4, 5, 6]
    assert behind.commits == []


# ------------------------------------------------------------ refusals by the lighthouse


def test_a_refusal_is_raised(lighthouse: Loopback) -> None:
    manager = make()
    manager.start_quorum()
    assert manager.should_commit()
    manager._runtime.shell.on_push(Refusal(RefusedError("wrong token: set FT_TOKEN")))
    with pytest.raises(LighthouseError, match="FT_TOKEN"):
        manager.start_quorum()
    manager.shutdown()


def test_a_late_restart_of_a_finished_job_is_told_so(lighthouse: Loopback) -> None:
    first = make()
    first.start_quorum()
    assert first.should_commit()
    first.leave("finished", finished=True)
    first.shutdown()
    late = make(replica_id="late")
    with pytest.raises(JobFinishedError, match="finished"):
        late.start_quorum()
    late.shutdown()


def test_a_dummy_group_works(lighthouse: Loopback) -> None:
    manager = make(pg=ProcessGroupDummy())
    manager.start_quorum()
    assert manager.should_commit()
    manager.shutdown()


def test_drain_is_seen_by_the_loop(manager: Manager) -> None:
    assert manager.drain_reason == ""
    manager._runtime.shell.on_push(Order(kill=False, reason="node goes away"))
    assert manager.drain_reason == "node goes away"
