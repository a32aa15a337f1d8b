"""What the leader sends to all after a vote: the same votes on all members, whatever one of them has met with."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch  # noqa: F401  # not while replicas wait for each other
import pytest

from ft_core.loop.stopping import stop_together
from ft_lightning._compat import writers
from ft_lightning.trainer import leader_files
from ft_lightning.trainer.leader_files import LeaderFiles
from tests.loop.looped import Looped
from tests.runtime.harness import both, crash
from tests.runtime.interleavings import moves, together

if TYPE_CHECKING:
    from ft_core import Manager
    from tests.runtime.harness import Cluster, Replica
    from tests.runtime.loopback import LoopbackControl

FAULT = RuntimeError("injected by the test")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas are in it: Lightning's rank is nobody's."""
    monkeypatch.setattr(writers, "set_rank_zero", lambda _tree, _rank: None)


class Trained(Looped):
    """A loop of the kit whose leader is Lightning's, of a Trainer that writes nothing."""

    def __init__(self, index: int, **options: Any) -> None:
        super().__init__(index, [], saves=False, **options)
        self.sent: list[tuple[int, int]] = []
        """Quorum and step of each broadcast that was begun."""
        self.leads: list[bool] = []
        """Whether it led, after each vote."""

    def wrap(self) -> None:
        super().wrap()
        strategy = SimpleNamespace(
            manager=self.manager, global_rank=0, replica_group=self.index, lighthouse_address="", first_room="",
            _tree="lightning.pytorch", group_leads=lambda first: first,
        )  # fmt: skip
        files = self.files = LeaderFiles(strategy)
        files.start(SimpleNamespace(loggers=[], callbacks=[], progress_bar_callback=None, log_dir=None))
        files.attach(self.manager, self.window, lambda: None)
        assert files._leadership is not None
        self.leadership = files._leadership
        self.window.on_vote = self.voted
        send = files._broadcast

        def sending(manager: Manager, sends: bool) -> None:
            self.sent.append((manager.quorum_id, manager.current_step()))
            send(manager, sends)

        files._broadcast = sending  # type: ignore[method-assign]

    def opened(self) -> None:
        self.files.opened()

    def voted(self, manager: Manager, _: bool = False) -> None:
        self.files.voted(manager)
        self.leads.append(self.files.leads)


def reports(replica: Replica) -> None:
    replica.manager.report_error(FAULT)


def test_one_broadcast_in_a_quorum_also_after_a_veto(cluster: Cluster) -> None:
    """Who has reported the error knows of it until the next step begins; the others do not."""
    replicas = [Trained(0), Trained(1, at={(0, "forward"): reports, (2, "forward"): reports})]
    cluster.run(*replicas)
    cluster.check(steps=6, survivors=2)
    assert [r.vetoes for r in replicas] == [[0, 2]] * 2
    assert cluster.lighthouse.asks == 2, "one quorum"
    assert [[step for _, step in r.sent] for r in replicas] == [[0]] * 2


def test_the_step_that_its_leader_left_in_the_forward_pass(cluster: Cluster) -> None:
    """It goes on, and the successor leads as soon as it is voted on, before anything of it is logged."""
    leader, *others = [Trained(i) for i in range(3)]
    here = together(3)
    for replica in others:
        replica.actions[3, "forward"] = moves(here)
    leader.actions[3, "forward"] = both(here, crash)
    cluster.run(leader, *others)
    cluster.check(steps=6, survivors=2)
    assert [r.vetoes for r in others] == [[], []], "the step went on"
    assert others[0].leads == [False] * 3 + [True] * 3
    assert others[1].leads == [False] * 6
    assert others[0].sent == others[1].sent
    assert [step for _, step in others[0].sent] == [1, 4], "after the first vote in each quorum"


def test_a_vote_to_stop_may_end_nothing_yet(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has a lease: that vote stops nobody, and the others take part in what follows a vote."""
    monkeypatch.setattr(leader_files, "BROADCAST_EVERY", 1)
    stays, ends = (Trained(i, steps=8, time_overrides={"autonomy_s": 0.3, "orphan_s": 100.0}) for i in range(2))
    controls: list[LoopbackControl] = []
    past = threading.Event()

    def lose_lease(_: Replica) -> None:
        controls.extend(cast("LoopbackControl", r.manager._runtime.shell.control) for r in (stays, ends))
        for control in controls:
            control.no_lease_since = time.monotonic()

    def stop(replica: Replica) -> None:
        past.wait(0.4)
        assert isinstance(replica, Trained)
        stop_together(replica.manager, lambda: replica.window.entered(None), lambda: replica.voted(replica.manager))
        replica.steps = 0

    stays.actions[2, "boundary"] = lose_lease
    stays.actions[4, "forward"] = lambda _: past.wait(0.4)
    ends.actions[4, "boundary"] = stop
    ends.steps = 5
    cluster.expected = 2
    cluster.start(stays, ends)
    cluster.lighthouse.wait_for(
        lambda: bool(controls) and all(r.manager._runtime.rank.attempt.awaits_lease for r in (stays, ends))
    )
    for control in controls:
        control.no_lease_since = None
    stays.join()
    ends.join()
    assert stays.manager.stop_agreed
    assert stays.sent == ends.sent
    assert [step for _, step in stays.sent] == [1, 2, 3, 4, 4], "also after the vote that was lost with the lease"
    assert cluster.lighthouse.asks == 2, "one quorum"
