"""Faults at a chosen replica and step: what survivors lose, and in which state everybody ends."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from ft_core.checkpointing import CheckpointTransport
from ft_core.errors import HealError, PeerError
from ft_core.process_group import FakeProcessGroupWrapper, ProcessGroupGloo
from ft_core.protocol.pushes import Change
from ft_core.protocol.rank import events as rank_events
from tests.runtime.harness import LIMIT_S, Cluster, Crash, Replica, both, crash, fail, hang, soft_error
from tests.runtime.interleavings import once_held, once_launched, until_broken

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

POINTS = ["boundary", "started", "forward", "backward", "stepped"]
SHORT: dict[str, Any] = {"timeout": timedelta(seconds=1), "time_overrides": {"join_s": 0.3, "heal_s": 5.0}}


def flaky() -> FakeProcessGroupWrapper:
    return FakeProcessGroupWrapper(ProcessGroupGloo(hostname="127.0.0.1"))


def collective_fails(replica: Replica) -> None:
    """The next collective runs, but this replica learns that it failed: it can't follow what the others agreed on."""
    assert isinstance(replica.pg, FakeProcessGroupWrapper)
    replica.pg.report_future_error(RuntimeError("injected"))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("use_async", [True, False])
def test_survivors_of_a_crash_lose_one_step(cluster: Cluster, point: str, use_async: bool) -> None:
    """Those that wait for it lose one: what a death costs in other places, `test_moving.py` shows."""
    survivors = [Replica(i, use_async_quorum=use_async) for i in range(2)]
    lost = 4 if point in ("backward", "stepped") else 3
    dies = once_launched(survivors, lost, crash)
    cluster.run(*survivors, Replica(2, at={(3, point): dies}, use_async_quorum=use_async))
    cluster.check(steps=6, survivors=2)
    cluster.check_numbers()
    assert [r.vetoes for r in survivors] == [[lost], [lost]]


@pytest.mark.parametrize("point", POINTS)
def test_a_restarted_replica_heals_and_ends_equal(cluster: Cluster, point: str) -> None:
    again = Replica(2, name="r2", seed=77, steps=10)
    others = [Replica(0, steps=10, at={(5, "boundary"): cluster.joins(again)}), Replica(1, steps=10)]
    cluster.run(*others, Replica(2, steps=10, at={(3, point): crash}))
    cluster.check(steps=10, survivors=3)
    cluster.check_numbers()
    assert again.commits[0].step > 5
    assert again.commits[0].participated  # a newcomer heals before its first forward


def test_two_of_three_crash_in_the_same_step(cluster: Cluster) -> None:
    cluster.run(Replica(0), *[Replica(i, at={(3, "forward"): crash}) for i in (1, 2)])
    cluster.check(steps=6, survivors=1)


@pytest.mark.parametrize("point", ["started", "forward"])
def test_a_soft_error_skips_the_step_for_everybody(cluster: Cluster, point: str) -> None:
    replicas = [Replica(0), Replica(1, at={(2, point): soft_error}), Replica(2)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    cluster.check_numbers()
    assert [r.vetoes for r in replicas] == [[2], [2], [2]]
    assert cluster.lighthouse.asks == 3  # nothing was rebuilt


def test_an_error_reported_after_the_fence_costs_its_reporter_only(cluster: Cluster) -> None:
    """The others have committed the step; one that is between two when it learns of it loses nothing."""
    other = Replica(0, at={(3, "boundary"): until_broken})
    late = Replica(1, at={(2, "backward"): once_held([other], 3, soft_error)})
    cluster.run(other, late)
    cluster.check(steps=6)
    assert (other.vetoes, late.vetoes) == ([], [2])
    assert [c.step for c in late.commits] == [1, 2, 4, 5, 6]


def test_an_error_reported_while_the_quorum_forms_counts(cluster: Cluster) -> None:
    """Found by reading: entering the quorum dropped it, and the broken gradient was committed."""
    lighthouse = cluster.lighthouse

    def change(replica: Replica) -> None:
        shell = replica.manager._runtime.shell
        shell.on_push(Change(shell.rank.quorum_id, "somebody wants to join"))
        lighthouse.hold_asks.clear()

    def report(replica: Replica) -> None:
        assert replica.manager._runtime.rank.forming
        soft_error(replica)
        lighthouse.release_asks()

    replicas = [Replica(0, at={(3, "forward"): change, (4, "started"): report}), Replica(1)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    assert [r.vetoes for r in replicas] == [[4], [4]]


def test_an_exception_in_forward_ends_its_replica_and_costs_the_others_nothing(cluster: Cluster) -> None:
    bad = Replica(1, at={(3, "started"): fail(KeyError("a bug of the user's"))})
    others = [Replica(0), Replica(2)]
    cluster.run(others[0], bad, others[1])
    cluster.check(steps=6, survivors=2, errors=True)
    assert isinstance(bad.error, KeyError)
    assert [r.error for r in others] == [None, None]
    assert [r.vetoes for r in others] == [[], []]


def test_a_caught_exception_in_the_middle_of_a_step(cluster: Cluster) -> None:
    """start_quorum after a step that was never voted on: the others must not wait for the join timeout."""
    odd = Replica(1, at={(3, "backward"): fail(KeyError("bad batch"))}, catch=KeyError)
    cluster.run(Replica(0), odd, Replica(2))
    cluster.check(steps=6)
    assert len(odd.caught) == 1


def test_everybody_skips_the_vote(cluster: Cluster) -> None:
    replicas = [Replica(i, at={(3, "backward"): fail(KeyError())}, catch=KeyError) for i in range(3)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    cluster.check_numbers()


def test_an_exception_inside_backward_is_vetoed(cluster: Cluster) -> None:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise KeyError("in backward")

    class Bad(Replica):
        def loss(self) -> torch.Tensor:
            if self.actions.pop((self.step, "in backward"), None):
                last = self.model[2]  # type: ignore[index]
                handle = last.register_forward_pre_hook(lambda _, args: (Boom.apply(args[0]),))  # type: ignore[no-untyped-call]
                try:
                    return super().loss()
                finally:
                    handle.remove()
            return super().loss()

        def iteration(self) -> None:
            try:
                super().iteration()
            except KeyError:
                self.caught.append(KeyError())
                assert not self.manager.should_commit()

    bad = Bad(1, at={(3, "in backward"): crash})
    cluster.run(Replica(0), bad)
    cluster.check(steps=6)
    assert len(bad.caught) == 1


def test_a_replica_that_hangs_is_left_out_and_heals_when_it_returns(cluster: Cluster) -> None:
    hung = Replica(1, steps=12, at={(3, "forward"): hang}, **SHORT)

    def release(actor: Replica) -> None:
        hung.gate.set()
        cluster.lets_in(hung)(actor)

    others = [Replica(0, steps=12, at={(5, "boundary"): release}, **SHORT), Replica(2, steps=12, **SHORT)]
    cluster.run(others[0], hung, others[1])
    cluster.check(steps=12)
    cluster.check_numbers()
    assert [r.vetoes for r in others] == [[3], [3]]
    assert "r1" in " ".join(line for line in cluster.lighthouse.log if "did not arrive" in line)


def test_a_paused_replica_is_waited_for(cluster: Cluster) -> None:
    """Longer than every timeout, and nobody takes it for dead."""
    seen = threading.Event()

    def paused(replica: Replica) -> None:
        with replica.manager.pause("validating", 20.0):
            cluster.lighthouse.wait_for(
                lambda: any(r.paused_until > 0 for r in cluster.lighthouse.room.records.values())
            )
            seen.wait(2.5)  # the point: more than timeout + join_s pass, and nothing happens

    cluster.run(Replica(0, **SHORT), Replica(1, at={(3, "boundary"): paused}, **SHORT))
    cluster.check(steps=6)
    assert [r.vetoes for r in cluster.replicas] == [[], []]
    assert cluster.lighthouse.asks == 2


def test_a_pause_around_whole_steps_stays_announced(cluster: Cluster) -> None:
    seen: list[float] = []
    room = cluster.lighthouse.room

    def look(replica: Replica) -> None:
        """After the vote of a step within the pause."""
        seen.append(room.records[replica.manager.replica_id].paused_until)

    def compiles(replica: Replica) -> None:
        pause = replica.manager.pause("compiling", 60.0)
        pause.__enter__()
        replica.actions |= {(3, "stepped"): look, (4, "stepped"): lambda _: pause.__exit__(None, None, None)}
        replica.actions[5, "boundary"] = look

    cluster.run(Replica(0), Replica(1, at={(3, "boundary"): compiles}))
    cluster.check(steps=6)
    assert seen[0] > 0
    assert seen[1] == 0


def test_a_pause_kills_no_survivor_that_waits_for_a_quorum(cluster: Cluster) -> None:
    """Longer than quorum_timeout, and the third is lost meanwhile: who waits for the paused one does not give up."""
    times = SHORT | {"quorum_timeout": timedelta(seconds=1)}
    survivor, paused_one = Replica(0, **times), Replica(1, **times)
    pausing = threading.Event()

    def paused(replica: Replica) -> None:
        replica.manager.num_participants()  # so that its attempt does not move (R19): it asks when it is back
        with replica.manager.pause("validating", 60.0):
            pausing.set()
            cluster.lighthouse.wait_for(lambda: cluster.lighthouse.asking("r0"))
            survivor.thread.join(2.5)  # the point: more than the quorum_timeout of the one that waits passes
            assert survivor.thread.is_alive(), survivor.error

    def crash_meanwhile(_: Replica) -> None:
        assert pausing.wait(LIMIT_S)
        raise Crash

    paused_one.actions[(3, "started")] = paused
    cluster.run(survivor, paused_one, Replica(2, at={(3, "boundary"): crash_meanwhile}, **times))
    cluster.check(steps=6, survivors=2)


def test_a_failed_collective_rebuilds_the_group(cluster: Cluster) -> None:
    """The others have the sum, and commit it; one that is between two when it learns of it loses nothing."""
    others = [Replica(i, at={(4, "boundary"): until_broken}) for i in (0, 2)]

    class Learns(FakeProcessGroupWrapper):
        """It ends its connections as soon as it learns of the error: not before the others have read what they need."""

        def _launch(self, name: str, *arguments: Any) -> Work:
            work = super()._launch(name, *arguments)
            if self.errored() is not None:
                once_held(others, 4)(bad)
            return work

    bad = Replica(1, pg=lambda: Learns(ProcessGroupGloo(hostname="127.0.0.1")), at={(3, "forward"): collective_fails})
    cluster.run(others[0], bad, others[1])
    cluster.check(steps=6)
    cluster.check_numbers()
    assert [r.vetoes for r in cluster.replicas] == [[], [3], []]


def test_a_failed_configure_is_tried_again(cluster: Cluster) -> None:
    def broken() -> FakeProcessGroupWrapper:
        group = flaky()
        group.report_configure_error(PeerError("injected"))
        return group

    # The other one has no connection yet that could break: its own budget ends its wait.
    times: dict[str, Any] = {
        "timeout": timedelta(seconds=1),
        "quorum_timeout": timedelta(seconds=10),
        "time_overrides": {"join_s": 5.0},
    }
    cluster.run(Replica(0, **times), Replica(1, pg=broken, **times))
    cluster.check(steps=6)


def test_a_loss_pushed_just_before_configure_ends_it(cluster: Cluster) -> None:
    """Found by reading: an abort between entering a quorum and building its group was lost: it waited for ever."""
    entered, release = threading.Event(), threading.Event()

    class Slow(ProcessGroupGloo):
        def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
            if world_size == 3 and not entered.is_set():
                entered.set()
                assert release.wait(LIMIT_S)
            super().configure(store_addr, replica_id, rank, world_size)

    class Dies(ProcessGroupGloo):
        def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
            assert entered.wait(LIMIT_S)
            raise crash_instead

    crash_instead = PeerError("never mind")
    dying = Replica(2, pg=lambda: Dies(hostname="127.0.0.1"))
    slow = Replica(0, pg=lambda: Slow(hostname="127.0.0.1"))
    cluster.expected = 3
    cluster.start(slow, Replica(1), dying)
    assert entered.wait(LIMIT_S)
    dying.manager._runtime.shell.control.shutdown()
    dying.manager._runtime.leaving.shut_down = True
    rank = slow.manager._runtime.rank
    cluster.lighthouse.wait_for(lambda: rank.broken)
    release.set()
    slow.join()
    cluster.replicas[1].join()
    assert slow.error is None
    assert [c.step for c in slow.commits] == list(range(1, 7))
    dying.manager._runtime.leaving.shut_down = False
    dying.manager._runtime.leaving.left = True
    dying.manager._runtime.shell.dispatch(rank_events.ShutDown())
    dying.join()


def test_optimizer_step_raising_heals_its_replica(cluster: Cluster) -> None:
    class Torn(torch.optim.SGD):
        fail_next = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            if self.fail_next:
                self.fail_next = False
                raise MemoryError("half way")
            with torch.no_grad():
                self.param_groups[0]["params"][0].sub_(1.0)
            super().step()

    def break_next(replica: Replica) -> None:
        assert isinstance(replica.inner, Torn)
        replica.inner.fail_next = True

    def torn(model: torch.nn.Module) -> Torn:
        return Torn(model.parameters(), lr=0.1)

    bad = Replica(1, optim=torn, at={(3, "forward"): break_next}, catch=MemoryError)
    cluster.run(Replica(0, optim=torn), bad, Replica(2, optim=torn))
    cluster.check(steps=6)
    assert len(bad.caught) == 1


def test_load_state_dict_failing_once(cluster: Cluster) -> None:
    class Picky(Replica):
        failures = 1

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.failures:
                self.failures -= 1
                self.model.load_state_dict({k: torch.zeros_like(v) for k, v in state["model"].items()})
                raise OSError("disk full")
            super().load_state_dict(state)

    picky = Picky(1, catch=OSError)
    cluster.run(Replica(0), picky, Replica(2))
    cluster.check(steps=6)
    cluster.check_numbers()
    assert len(picky.caught) == 1


class Relay(CheckpointTransport[Any]):
    """State through a dict in this process; `before_receive` may raise."""

    shelf: ClassVar[dict[tuple[str, int], Any]] = {}

    def __init__(self, name: str, before_receive: Any = None) -> None:
        self.name, self.before_receive = name, before_receive
        self.received = 0

    def metadata(self) -> str:
        return self.name

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        import copy

        self.shelf[self.name, step] = copy.deepcopy(state_dict)

    def disallow_checkpoint(self) -> None: ...

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        if self.before_receive is not None:
            self.before_receive(metadata)
        waited = threading.Event()
        for _ in range(500):
            if (metadata, step) in self.shelf:
                self.received += 1
                return self.shelf[metadata, step]
            waited.wait(0.01)
        raise TimeoutError(metadata)

    def shutdown(self, wait: bool = True) -> None: ...


def test_healing_through_a_transport_of_ones_own(cluster: Cluster) -> None:
    Relay.shelf.clear()
    transports = [Relay(f"t{i}") for i in range(4)]
    newcomer = Replica(3, steps=8, checkpoint_transport=transports[3])
    first = Replica(0, steps=8, at={(3, "boundary"): cluster.joins(newcomer)}, checkpoint_transport=transports[0])
    cluster.run(first, *[Replica(i, steps=8, checkpoint_transport=transports[i]) for i in (1, 2)], expected=3)
    cluster.check(steps=8)
    cluster.check_numbers()
    assert transports[3].received == 1


def test_a_donor_that_fails_is_replaced_by_the_next(cluster: Cluster) -> None:
    Relay.shelf.clear()
    tried: list[str] = []

    def first_fails(metadata: str) -> None:
        tried.append(metadata)
        if len(tried) == 1:
            raise ConnectionError("donor died")

    transports = [Relay("t0"), Relay("t1"), Relay("t2", first_fails)]
    newcomer = Replica(2, steps=8, checkpoint_transport=transports[2])
    first = Replica(0, steps=8, at={(3, "boundary"): cluster.joins(newcomer)}, checkpoint_transport=transports[0])
    cluster.run(first, Replica(1, steps=8, checkpoint_transport=transports[1]), expected=2)
    cluster.check(steps=8)
    assert sorted(tried) == ["t0", "t1"]


def test_a_heal_that_fails_never_vetoes_the_others(cluster: Cluster) -> None:
    """R11: weight zero and change-wanted; it asks again and is healed then."""
    Relay.shelf.clear()
    failures = [HealError("injected")] * 2

    def fails_twice(_: str) -> None:
        if failures:
            raise failures.pop()

    transports = [Relay("t0"), Relay("t1"), Relay("t2", fails_twice)]
    newcomer = Replica(2, steps=10, checkpoint_transport=transports[2])
    others = [
        Replica(0, steps=10, at={(3, "boundary"): cluster.joins(newcomer)}, checkpoint_transport=transports[0]),
        Replica(1, steps=10, checkpoint_transport=transports[1]),
    ]
    cluster.run(*others, expected=2)
    cluster.check(steps=10)
    assert [r.vetoes for r in others] == [[], []]
    assert newcomer.commits


def test_a_heal_longer_than_the_timeout_breaks_nothing(cluster: Cluster) -> None:
    """Found by reading: the watchdogs of the donors, and of the receiver, took the transfer for a hang."""
    Relay.shelf.clear()
    slow = threading.Event()
    transports = [Relay("t0"), Relay("t1", lambda _: slow.wait(2.0))]  # more than timeout
    newcomer = Replica(1, steps=8, checkpoint_transport=transports[1], **SHORT)
    first = Replica(
        0, steps=8, at={(3, "boundary"): cluster.joins(newcomer)}, checkpoint_transport=transports[0], **SHORT
    )
    cluster.run(first, expected=1)
    cluster.check(steps=8)
    assert first.vetoes == []
    assert transports[1].received == 1


def test_the_donor_dies_while_others_heal_from_it(cluster: Cluster) -> None:
    donor = Replica(0, steps=10)

    class Dies(Replica):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)

    newcomer = Dies(2, steps=10)
    donor.actions[3, "boundary"] = both(cluster.joins(newcomer))
    donor.actions[5, "forward"] = crash
    cluster.run(donor, Replica(1, steps=10), expected=2)
    cluster.check(steps=10, survivors=2)
