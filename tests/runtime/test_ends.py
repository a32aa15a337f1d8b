"""Leaving, finishing, failing: what the others notice, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from ft_core import Manager, ProcessGroupGloo
from ft_core.errors import LighthouseError
from ft_core.protocol.pushes import Change
from tests.runtime.harness import (
    LIMIT_S,
    PATIENT,
    PATIENT_S,
    Cluster,
    Replica,
    both,
    crash,
    crash_seen,
    digest_of,
    fail,
    with_batch_norm,
)
from tests.runtime.interleavings import once_held, once_launched, together, until_broken

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.runtime.loopback import Loopback, LoopbackControl


class Leaver(Replica):
    """Leaves at step `until`, then looks at itself."""

    def __init__(self, index: int, until: int, **options: Any) -> None:
        super().__init__(index, **options)
        self.until = until

    def train(self) -> None:
        while self.manager.current_step() < self.until:
            self.iteration()
        self.manager.leave("had enough")
        self.after = (self.manager.current_step(), self.manager.state_dict()["step"], self.digest())


@pytest.mark.parametrize("until", [1, 3, 5])
def test_leaving_costs_the_others_nothing(cluster: Cluster, until: int) -> None:
    leaver = Leaver(2, until, steps=8)
    others = [Replica(0, steps=8), Replica(1, steps=8)]
    cluster.run(*others, leaver)
    cluster.check(steps=8, survivors=2)
    cluster.check_numbers()
    assert [r.vetoes for r in others] == [[], []]
    # What it could save now is consistent: nobody stepped its optimizer in the last fence.
    assert leaver.after == (until, until, leaver.commits[-1].digest)


def test_all_leave_one_after_another(cluster: Cluster) -> None:
    replicas = [Leaver(i, 2 * i + 2, steps=12) for i in range(3)]
    cluster.run(*replicas, Replica(3, steps=12))
    cluster.check(steps=12, survivors=1)
    assert cluster.replicas[3].vetoes == []


def test_the_end_of_a_job_is_quick(cluster: Cluster, exit_s: Callable[[float], None]) -> None:
    """Nobody waits for anything, and a second shutdown does nothing."""
    exit_s(PATIENT_S)
    cluster.run(*[Replica(i, **PATIENT) for i in range(3)])
    cluster.check(steps=6)
    for replica in cluster.replicas:
        del replica.manager._runtime.leaving._shell
        replica.manager.shutdown()


@pytest.mark.parametrize(
    ("point", "fence"),
    [("boundary", ""), ("started", ""), ("forward", ""), ("backward", "completes"), ("backward", "breaks")],
)
def test_an_exception_in_user_code_with_shutdown_in_finally(cluster: Cluster, point: str, fence: str) -> None:
    """A last fence tells the others, unless its own of this step is on its way: they complete that, or cannot."""
    others = [Replica(1), Replica(2)]
    fails = fail(ZeroDivisionError())
    bad = Replica(0, at={(3, point): once_held(others, 4, fails) if fence == "completes" else fails})
    for other in others if fence else ():
        other.actions[(4, "boundary") if fence == "completes" else (3, "forward")] = until_broken
    cluster.run(bad, *others)
    cluster.check(steps=6, survivors=2, errors=True)
    assert isinstance(bad.error, ZeroDivisionError)
    assert [r.error for r in others] == [None, None]
    assert [r.vetoes for r in others] == [[3] if fence == "breaks" else []] * 2


class Stops(Replica):
    """Shuts down without waiting, between two steps."""

    def iteration(self) -> None:
        self.step = self.manager.current_step()
        self.at("boundary")
        if self.step == 3:
            self.manager.shutdown(wait=False)
            self.steps = 0
        else:
            super().iteration()


@pytest.mark.parametrize(
    "points", ["boundary boundary", "forward forward", "launched launched", "boundary launched", "forward launched"]
)
def test_shutdown_without_waiting(cluster: Cluster, points: str) -> None:
    """It costs those one attempt that have begun it; wherever they are they learn it by the goodbye.

    (Of two the first that waits in a collective ends its connections, which may tell the other before the goodbye does:
    its attempt moves then, R19. So that order is not among these.)
    """
    here, there = together(3), together(2)
    others = [Replica(0), Replica(1)]
    waits = []
    for other, point in zip(others, points.split(), strict=True):
        if point == "launched":
            waits.append(other)
            other.actions[3, "forward"] = here
        else:
            other.actions[3, point] = both(here, until_broken, *([there] if "launched" not in points else []))
    stops = Stops(2, at={(3, "boundary"): both(here, once_launched(waits, 3))})
    cluster.run(*others, stops)
    cluster.check(steps=6, survivors=2)
    assert [c.step for c in stops.commits] == [1, 2, 3]
    assert [r.vetoes for r in others] == [[] if point == "boundary" else [3] for point in points.split()]


def test_shutdown_while_waiting_for_a_quorum(cluster: Cluster) -> None:
    alone = Replica(0, min_replica_size=2)
    cluster.start(alone)
    cluster.lighthouse.wait_for(lambda: cluster.lighthouse.asking("r0"))
    alone.manager.shutdown()
    alone.join()
    assert isinstance(alone.error, LighthouseError)


def test_the_last_survivor_goes_on(cluster: Cluster) -> None:
    cluster.run(Replica(0, at={(2, "forward"): crash}), Replica(1, at={(4, "forward"): crash}), Replica(2))
    cluster.check(steps=6, survivors=1)
    cluster.check_numbers()


def open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "socket" in target or "eventpoll" in target or "eventfd" in target:
            found.add(target)
    return found


def ft_threads() -> set[str]:
    return {
        t.name for t in threading.enumerate() if t.name.startswith(("ft-quorum", "ft-watchdog", "ft-heal", "ft-lease"))
    }


def test_nothing_is_left_behind(cluster: Cluster) -> None:
    def round_(offset: int) -> None:
        cluster.replicas.clear()
        again = Replica(9, name=f"again{offset}", steps=8)
        cluster.run(
            Replica(0, name=f"a{offset}", steps=8, at={(5, "boundary"): cluster.joins(again)}),
            Replica(1, name=f"b{offset}", steps=8),
            Replica(2, name=f"c{offset}", steps=8, at={(3, "forward"): crash_seen}),
        )
        cluster.check()
        cluster.replicas.clear()

    round_(0)  # what is made once per process
    gc.collect()
    before = open_files()
    round_(1)
    gc.collect()
    assert ft_threads() == set()
    end = time.monotonic() + 10
    pause = threading.Event()
    while len(open_files() - before) > 2 and time.monotonic() < end:  # the reaper destroys groups in the background
        pause.wait(0.02)
    # Idle connections to the tests' shared store are pooled.
    assert len(open_files() - before) <= 2


def test_a_constructor_that_fails_leaves_nothing(lighthouse: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    from ft_core.runtime import startup

    def refuses(*_: Any) -> Any:
        raise LighthouseError("cannot listen on port=1: it is in use")

    monkeypatch.setattr(startup, "_control", refuses)
    gc.collect()
    before = open_files()
    with pytest.raises(LighthouseError, match="port=1"):
        Manager(
            ProcessGroupGloo(hostname="127.0.0.1"), min_replica_size=1, lighthouse_addr="h:1", hostname="127.0.0.1",
            timeout=timedelta(seconds=5),
        )  # fmt: skip
    gc.collect()
    assert ft_threads() == set()
    assert open_files() - before == set()


# ------------------------------------------------------------ parity


def corrupt(replica: Replica) -> None:
    with torch.no_grad():
        next(replica.model.parameters()).view(-1)[0] += 1e-3


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_silently_differing_replica_is_reported_and_healed(
    cluster: Cluster, victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = [Replica(i, steps=8, parity_check_every=2, parity_sample_steps=0) for i in range(3)]
    replicas[victim].actions[3, "boundary"] = corrupt
    cluster.run(*replicas)
    assert [r.error for r in replicas] == [None] * 3
    assert f"r{victim}:" in next(m.getMessage() for m in caplog.records if "differs from the others" in m.getMessage())
    ends = {digest_of(r.model.state_dict(), r.inner.state_dict()) for r in replicas}
    assert len(ends) == 1
    by_step: dict[int, set[str]] = {}
    for replica in replicas:
        for commit in replica.commits:
            by_step.setdefault(commit.step, set()).add(commit.digest)
    assert [step for step, digests in by_step.items() if len(digests) > 1] == [4]  # found at the next check, not later
    assert sorted(by_step) == list(range(1, 9))


def test_buffers_that_forward_changes_are_not_compared(cluster: Cluster) -> None:
    """Each replica has seen other batches when the comparison is made; they are alike again after the commit."""
    replicas = [Replica(i, steps=6, build=with_batch_norm, parity_check_every=2) for i in range(2)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    assert [r.vetoes for r in replicas] == [[], []]


def test_parity_holds_through_healing(cluster: Cluster) -> None:
    again = Replica(3, name="r2", steps=12, parity_check_every=1)
    replicas = [Replica(i, steps=12, parity_check_every=1) for i in range(3)]
    replicas[2].actions[3, "forward"] = once_launched(replicas[:2], 3, crash)
    replicas[0].actions[5, "boundary"] = cluster.joins(again)
    cluster.run(*replicas)
    cluster.check(steps=12, survivors=3)
    assert [r.vetoes for r in replicas[:2]] == [[3], [3]]


# ------------------------------------------------------------ without a lighthouse


def test_steps_go_on_without_a_lease_for_autonomy_s_and_no_longer(cluster: Cluster) -> None:
    times = {"autonomy_s": 0.3, "orphan_s": 100.0}
    replicas = [Replica(i, steps=8, time_overrides=times) for i in range(2)]

    def lose_lease(replica: Replica) -> None:
        for r in replicas:
            cast("LoopbackControl", r.manager._runtime.shell.control).no_lease_since = time.monotonic()

    def over(replica: Replica) -> None:
        past.wait(0.4)
        replica.actions[4, "stepped"] = restore

    def restore(replica: Replica) -> None:
        for r in replicas:
            cast("LoopbackControl", r.manager._runtime.shell.control).no_lease_since = None

    past = threading.Event()
    replicas[0].actions[2, "boundary"] = lose_lease
    for replica in replicas:
        replica.actions[4, "forward"] = over
    cluster.run(*replicas)
    cluster.check(steps=8)
    assert [r.vetoes for r in replicas] == [[4], [4]]
    assert cluster.lighthouse.asks == 2


def test_a_frozen_replica_is_lost_and_heals(cluster: Cluster) -> None:
    """Its lease went silent, its threads come back later: what it does then reaches nobody."""
    frozen = Replica(1, steps=12)

    def freeze(replica: Replica) -> None:
        once_launched(others, 3)(replica)
        cluster.lighthouse.cut(replica.manager.replica_id, silence_s=100.0)
        assert replica.gate.wait(LIMIT_S)
        replica.manager._runtime.shell.control.start()  # the lease is re-opened

    def thaw(actor: Replica) -> None:
        frozen.gate.set()
        cluster.lets_in(frozen)(actor)

    frozen.actions[3, "forward"] = freeze
    others = [Replica(0, steps=12, at={(6, "boundary"): thaw}), Replica(2, steps=12)]
    cluster.run(others[0], frozen, others[1])
    cluster.check(steps=12)
    cluster.check_numbers()
    assert [r.vetoes for r in others] == [[3], [3]]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_finishing_while_a_change_is_pending_loses_no_last_step(cluster: Cluster, victim: int) -> None:
    """Found by the harness: leaving with a change agreed on cut off peers that were still reading the last fence."""
    replicas = [Replica(i, steps=4) for i in range(3)]

    def change(replica: Replica) -> None:
        shell = replica.manager._runtime.shell
        shell.on_push(Change(shell.rank.quorum_id, "somebody wants to join"))

    replicas[victim].actions[3, "forward"] = change
    cluster.run(*replicas)
    cluster.check(steps=4)
    assert [r.vetoes for r in replicas] == [[], [], []]
