"""A group of three ranks: one ask, one answer, one verdict, one end."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ft_core.control.group.server import GroupServer
from ft_core.control.lighthouse.lease_client import LeaseSettings
from ft_core.control.link import Control, LeaderControl, LocalControl, RankControl
from ft_core.errors import ConfigError, FaultToleranceError, LighthouseError, RefusedError
from ft_core.protocol.lighthouse.events import Hello
from ft_core.protocol.types import VOID, Ask, Outcome, Quorum, Verdict, Version
from ft_core.settings import TimeBudget
from tests.control.recorder import BUDGET, Recorder, Replica, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core.control.lighthouse.server import LighthouseServer
    from ft_core.rpc.loop_server import Stream

ID = "g:1"
SIZE = 3


class Group:
    """Three ranks in this process."""

    def __init__(self, address: str, *, drains: bool = False, budget: TimeBudget = BUDGET, **settings: Any) -> None:
        self.recorders = [Recorder(Hello(ID, "g", 0, 0, group_world_size=SIZE)) for _ in range(SIZE)]
        lease = LeaseSettings(address, ID, budget, **settings)
        leader = LeaderControl(lease, self.recorders[0], world_size=SIZE, hostname="127.0.0.1", drains=drains)
        self.address = leader.address
        to_leader = replace(lease, address=leader.address, setting="group rank 0's address")
        self.controls: list[Control] = [leader]
        self.controls += [RankControl(to_leader, self.recorders[r], rank=r, world_size=SIZE) for r in (1, 2)]
        self.seqs = [0, 10, 20]

    def start(self) -> Group:
        for control in self.controls:
            control.start()
        for control in self.controls:
            control.wait_connected(5)
        return self

    def ask(self, rank: int, **more: Any) -> None:
        self.seqs[rank] += 1
        recorder = self.recorders[rank]
        left = recorder.quorum.quorum_id if recorder.quorum else 0
        ask = Ask(ID, self.seqs[rank], quorum_id=left, group_world_size=SIZE, heal_addresses=(f"heal{rank}",))
        self.controls[rank].ask(replace(ask, **more))

    def answers(self) -> list[Quorum]:
        return [
            self.recorders[rank].wait("quorum", lambda s, _, rank=rank: s == self.seqs[rank])[1] for rank in range(SIZE)
        ]

    def vote(self, attempt: int, outcomes: list[Outcome], timeout_s: float = 5.0) -> list[Verdict]:
        quorum = self.recorders[0].quorum
        assert quorum is not None

        def one(rank: int) -> Verdict:
            flags: dict[str, Any] = {"change": rank == 1, "stop": rank == 2}
            vote = Verdict(quorum.quorum_id, attempt, outcomes[rank], f"rank {rank}", 2, 2, **flags)
            return self.controls[rank].vote(vote, timeout_s)

        with ThreadPoolExecutor(SIZE) as threads:
            return list(threads.map(one, range(len(outcomes))))

    def close(self) -> None:
        for control in reversed(self.controls):
            control.shutdown()


@pytest.fixture
def bare(lighthouse: LighthouseServer) -> Iterator[Group]:
    group = Group(lighthouse.address())
    yield group
    group.close()


@pytest.fixture
def group(bare: Group) -> Group:
    """In a quorum."""
    bare.start()
    for rank in range(SIZE):
        bare.ask(rank)
    bare.answers()
    return bare


COMMIT, VETO, BROKEN = Outcome.COMMIT, Outcome.VETO, Outcome.BROKEN


def test_all_ranks_ask_as_one(group: Group) -> None:
    first, *others = group.answers()
    assert all(quorum == first for quorum in others)
    member = first.members[0]
    assert (member.replica_id, member.group_world_size) == (ID, SIZE)
    assert member.heal_addresses == ("heal0", "heal1", "heal2")


def test_again_with_another_state_on_one_rank_heals_the_whole_group(
    group: Group, replica: Callable[..., Replica]
) -> None:
    other = replica("h:1", group_world_size=SIZE)
    other.lease.wait_connected(5)
    other.ask(step=4)
    for rank in range(SIZE):
        group.recorders[rank].wait("change_pending")
        group.ask(rank, version=Version(4, 9 if rank == 1 else 1))
    assert [member.version for member in group.answers()[2].members] == [VOID, Version(4, 0)]


def test_one_verdict_for_all(group: Group) -> None:
    for attempt, outcomes, wanted in (
        (0, [COMMIT, COMMIT, COMMIT], COMMIT),
        (1, [COMMIT, VETO, COMMIT], VETO),
        (2, [COMMIT, COMMIT, COMMIT], COMMIT),
    ):
        verdicts = group.vote(attempt, outcomes)
        assert {verdict.outcome for verdict in verdicts} == {wanted}
        assert all(verdict.change and verdict.stop for verdict in verdicts)


def test_a_vote_may_be_repeated(group: Group) -> None:
    first = group.vote(0, [COMMIT, COMMIT, COMMIT])
    assert group.vote(0, [VETO, VETO, VETO]) == first


def test_one_broken_rank_breaks_the_group(group: Group) -> None:
    quorum = group.answers()[0]
    assert {verdict.outcome for verdict in group.vote(0, [COMMIT, BROKEN, COMMIT])} == {BROKEN}
    for rank in (0, 2):
        assert group.recorders[rank].wait("member_lost") == (quorum.quorum_id, (ID,))
    for rank in range(SIZE):
        group.ask(rank, failed=True)
    assert group.answers()[0].quorum_id > quorum.quorum_id
    assert {verdict.outcome for verdict in group.vote(0, [COMMIT, COMMIT, COMMIT])} == {COMMIT}


@pytest.mark.parametrize("rank", range(SIZE))
def test_breaking_is_told_to_every_other_rank_once(group: Group, rank: int) -> None:
    quorum_id = group.answers()[0].quorum_id
    group.controls[rank].break_group(quorum_id, "my ring broke")
    group.controls[rank].break_group(quorum_id, "my ring broke")
    for other in range(SIZE):
        if other != rank:
            assert group.recorders[other].wait("member_lost") == (quorum_id, (ID,))
            group.controls[other].break_group(quorum_id, "so I heard")
    for each in range(SIZE):
        group.ask(each, failed=True)
    group.answers()
    assert [len(group.recorders[r].of("member_lost")) for r in range(SIZE)] == [int(r != rank) for r in range(SIZE)]


def test_an_ask_after_a_failure_breaks_the_ranks_that_have_not_noticed(group: Group) -> None:
    quorum_id = group.answers()[0].quorum_id
    group.ask(2, failed=True, reason="ring 2 broke")
    for rank in (0, 1):
        assert group.recorders[rank].wait("member_lost") == (quorum_id, (ID,))


def test_a_dead_rank_breaks_the_group_and_is_named(group: Group) -> None:
    quorum_id = group.answers()[0].quorum_id
    group.controls[2].shutdown()
    began = time.monotonic()
    assert {verdict.outcome for verdict in group.vote(0, [COMMIT, COMMIT])} == {BROKEN}
    assert time.monotonic() - began < 3
    for rank in (0, 1):
        assert group.recorders[rank].wait("member_lost") == (quorum_id, (ID,))
        group.ask(rank, failed=True)
    for rank in (0, 1):
        group.recorders[rank].wait("reason", lambda text: "group rank 2" in text and "not connected: 2" in text)
        assert "group rank 2" in group.controls[rank].last_reason


def test_a_rank_that_was_connected_for_long_may_reconnect_within_the_grace(lighthouse: LighthouseServer) -> None:
    budget = TimeBudget.derive(8.0, overrides={"liveness_s": 0.4, "grace_s": 0.4, "progress_s": 0.05})
    group = Group(lighthouse.address(), budget=budget).start()
    try:
        for rank in range(SIZE):
            group.ask(rank)
        group.answers()
        one = group.controls[1]
        assert isinstance(one, RankControl)
        first = one.last_ack
        wait_until(lambda: one.last_ack - first > budget.liveness_s)  # its stream has been renewed all the time
        call = one._call
        assert call is not None
        call.cancel()
        wait_until(lambda: one._call not in (None, call) and one.connected)
        assert {verdict.outcome for verdict in group.vote(0, [COMMIT, COMMIT, COMMIT])} == {COMMIT}
        assert not any(recorder.of("member_lost") for recorder in group.recorders)
    finally:
        group.close()


def test_a_group_that_lost_a_rank_holds_nobody_and_comes_back_as_one(
    group: Group, replica: Callable[..., Replica]
) -> None:
    other = replica("h:1", group_world_size=SIZE)
    other.lease.wait_connected(5)
    other.ask()
    for rank in range(SIZE):
        group.recorders[rank].wait("change_pending")
        group.ask(rank)
    quorum = other.answer()
    group.controls[2].shutdown()
    assert other.recorder.wait("member_lost") == (quorum.quorum_id, (ID,))
    for rank in (0, 1):
        group.ask(rank, failed=True)
    since = time.monotonic()
    other.ask(failed=True)
    assert other.answer().ids == ("h:1",)
    assert time.monotonic() - since < BUDGET.join_s, "the group was not waited for"
    settings = LeaseSettings(group.address, ID, BUDGET)
    group.controls[2] = RankControl(settings, group.recorders[2], rank=2, world_size=SIZE)
    group.controls[2].start()
    group.ask(2)
    other.recorder.wait("change_pending")
    other.ask()
    assert other.answer().ids == (ID, "h:1")


def test_a_rank_lost_while_the_ask_is_open_makes_the_ask_wait(
    bare: Group, replica: Callable[..., Replica], lighthouse: LighthouseServer
) -> None:
    other = replica("h:1", group_world_size=SIZE)
    other.lease.wait_connected(5)
    other.ask()
    quorum = other.answer()
    bare.start()
    for rank in range(SIZE):
        bare.ask(rank)
    other.recorder.wait("change_pending")  # the group's ask is open
    bare.controls[1].shutdown()
    records = lighthouse._rooms.room("default").room.records  # looked at only
    wait_until(lambda: bool(records[ID].incomplete))
    other.ask()
    assert other.answer().ids == ("h:1",)
    assert other.answer().quorum_id > quorum.quorum_id
    bare.controls[1] = RankControl(LeaseSettings(bare.address, ID, BUDGET), bare.recorders[1], rank=1, world_size=SIZE)
    bare.controls[1].start()
    bare.ask(1)
    wait_until(lambda: not records[ID].incomplete)
    other.ask()
    assert other.answer().ids == (ID, "h:1")
    assert len({quorum.quorum_id for quorum in bare.answers()}) == 1


def test_a_dead_leader_breaks_the_others(group: Group) -> None:
    quorum_id = group.answers()[0].quorum_id
    results: list[Verdict] = []
    vote = Verdict(quorum_id, 0, COMMIT)
    voter = threading.Thread(target=lambda: results.append(group.controls[1].vote(vote, 10)))
    voter.start()
    group.controls[0].shutdown()
    voter.join(5)
    assert results[0].outcome is BROKEN
    assert group.recorders[2].wait("member_lost") == (quorum_id, (ID,))
    assert "group rank 0" in group.controls[1].last_reason


def test_a_vote_that_nobody_joins_is_broken_at_the_timeout(group: Group) -> None:
    verdict = group.controls[1].vote(Verdict(group.answers()[0].quorum_id, 0, COMMIT), 0.1)
    assert verdict.outcome is BROKEN
    assert "did not agree" in verdict.reason


@pytest.mark.parametrize("rank", [0, 1])
def test_a_vote_that_waited_too_long_is_not_counted(group: Group, rank: int) -> None:
    """Otherwise the ranks that vote later apply a commit that this one does not."""
    vote = Verdict(group.answers()[0].quorum_id, 0, COMMIT)
    assert group.controls[rank].vote(vote, 0.1).outcome is BROKEN
    others = [group.controls[other].vote(vote, 5.0) for other in range(SIZE) if other != rank]
    assert [verdict.outcome for verdict in others] == [BROKEN, BROKEN]
    assert "did not agree" in others[0].reason


def test_the_lighthouses_pushes_reach_every_rank(group: Group, replica: Callable[..., Replica]) -> None:
    other = replica("h:1", group_world_size=SIZE)
    other.lease.wait_connected(5)
    other.ask()
    for recorder in group.recorders:
        assert recorder.wait("change_pending")[0] == group.answers()[0].quorum_id
    for rank in range(SIZE):
        group.ask(rank)
    quorum = other.answer()
    other.lease.progress(0, "saving", VOID, paused_s=9.0)
    for recorder in group.recorders:
        assert recorder.wait("paused")[:2] == (quorum.quorum_id, "h:1")
    other.close()
    for recorder in group.recorders:
        assert recorder.wait("member_lost") == (quorum.quorum_id, ("h:1",))


def test_a_pause_of_any_rank_is_the_groups(group: Group, replica: Callable[..., Replica]) -> None:
    other = replica("h:1", group_world_size=SIZE)
    other.lease.wait_connected(5)
    other.ask()
    for rank in range(SIZE):
        group.recorders[rank].wait("change_pending")
        group.ask(rank)
    other.answer()
    group.controls[2].progress(0, "validation", VOID, paused_s=9.0)
    assert other.recorder.wait("paused")[1] == ID
    group.controls[2].progress(0, "step", VOID)
    other.recorder.wait("paused", lambda _id, _who, for_s: for_s == 0)


@pytest.mark.parametrize("paused", range(SIZE))
def test_a_vote_waits_for_a_rank_that_is_paused(group: Group, paused: int) -> None:
    quorum = group.answers()[0]
    group.controls[paused].progress(0, "saving", VOID, paused_s=60.0)
    others = [rank for rank in range(SIZE) if rank != paused]
    for rank in others:
        group.recorders[rank].wait("paused", lambda _id, who, for_s: who == ID and for_s > 50)
    vote = Verdict(quorum.quorum_id, 0, COMMIT, "", 2, 2)
    with ThreadPoolExecutor(SIZE) as threads:
        waiting = [threads.submit(group.controls[rank].vote, vote, 0.2) for rank in others]
        assert not futures.wait(waiting, 0.7, futures.FIRST_COMPLETED).done, "longer than the limit of a vote"
        group.controls[paused].progress(0, "step", VOID)
        assert group.controls[paused].vote(vote, 5.0).outcome is COMMIT
        assert [future.result(5.0).outcome for future in waiting] == [COMMIT, COMMIT]


def test_a_vote_is_over_a_limit_after_a_pause_that_ends_early(group: Group) -> None:
    quorum = group.answers()[0]
    group.controls[2].progress(0, "saving", VOID, paused_s=60.0)
    group.recorders[1].wait("paused")
    vote = Verdict(quorum.quorum_id, 0, COMMIT, "", 2, 2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(group.controls[1].vote, vote, 0.3)
        assert not futures.wait([waiting], 0.7).done
        group.controls[2].progress(0, "step", VOID)
        assert waiting.result(5.0).outcome is BROKEN


def test_a_vote_waits_for_another_group_that_is_paused(group: Group, replica: Callable[..., Replica]) -> None:
    other = replica("h:1", group_world_size=SIZE)
    other.lease.wait_connected(5)
    other.ask()
    for rank in range(SIZE):
        group.recorders[rank].wait("change_pending")
        group.ask(rank)
    quorum = other.answer()
    other.lease.progress(0, "saving", VOID, paused_s=60.0)
    for recorder in group.recorders:
        recorder.wait("paused")
    vote = Verdict(quorum.quorum_id, 0, COMMIT, "", 2, 2)
    with ThreadPoolExecutor(SIZE) as threads:
        waiting = [threads.submit(group.controls[rank].vote, vote, 0.2) for rank in (0, 1)]
        assert not futures.wait(waiting, 0.7, futures.FIRST_COMPLETED).done, "rank 2 waits for it in its ring"
        assert group.controls[2].vote(vote, 5.0).outcome is COMMIT
        assert [future.result(5.0).outcome for future in waiting] == [COMMIT, COMMIT]


def test_a_pause_open_while_a_quorum_forms_is_known_to_all_ranks_of_the_group(bare: Group) -> None:
    bare.start()
    for rank in range(SIZE - 1):
        bare.ask(rank)
    bare.controls[2].progress(0, "validation", VOID, paused_s=60.0)
    for recorder in bare.recorders[:2]:
        recorder.wait("paused")
        recorder.wait("awaited", lambda for_s: for_s > 50)  # those that have asked wait for it, however long
    bare.ask(2)
    quorum = bare.answers()[0]
    for recorder in bare.recorders:
        assert recorder.wait("paused", lambda id_, *_: id_ == quorum.quorum_id)[1] == ID


def test_acknowledgements_reach_every_rank_with_the_leases_age(group: Group) -> None:
    since = time.monotonic()
    wait_until(lambda: all(control.last_ack > since for control in group.controls))
    assert all(control.connected for control in group.controls)
    assert all(control.last_ack <= time.monotonic() for control in group.controls)


def test_without_a_lighthouse_no_rank_is_acknowledged(group: Group, lighthouse: LighthouseServer) -> None:
    lighthouse.shutdown()
    gone = time.monotonic()
    threading.Event().wait(0.6)  # several renewals between the ranks
    assert all(control.last_ack < gone + 0.3 for control in group.controls)


def test_differing_settings_are_refused_on_all_ranks(bare: Group) -> None:
    bare.start()
    for rank in range(SIZE):
        bare.ask(rank, min_replicas=1 + rank)
    for rank in range(SIZE):
        error = bare.recorders[rank].wait("refused")[0]
        assert isinstance(error, ConfigError)
        assert "differ in min_replicas" in str(error)


def test_ranks_that_never_come_are_named(lighthouse: LighthouseServer) -> None:
    group = Group(lighthouse.address())
    hurry = replace(BUDGET, connect_s=0.3)
    leader = LeaderControl(
        LeaseSettings(lighthouse.address(), "late:1", hurry), group.recorders[0], world_size=SIZE, hostname="127.0.0.1"
    )
    leader.start()
    error = group.recorders[0].wait("refused")[0]
    assert isinstance(error, RefusedError)
    assert "group ranks 1, 2 of late:1 never connected" in str(error)
    leader.shutdown()
    group.close()


def test_a_leader_that_was_refused_tells_ranks_that_start_later(
    lighthouse: LighthouseServer, replica: Callable[..., Replica]
) -> None:
    other = replica("h:1")
    other.ask()
    other.answer()
    group = Group(lighthouse.address())
    leader, *late = group.controls
    leader.start()
    group.recorders[0].wait("refused")
    ending = threading.Thread(target=leader.shutdown)
    ending.start()
    for control in late:
        control.start()
    for recorder in group.recorders:
        assert "g:1 has 3 ranks, but h:1 has 1" in str(recorder.wait("refused")[0])
    ending.join(BUDGET.connect_s / 2)
    assert not ending.is_alive(), "it waited although everybody knew"
    group.close()


class SlowWrites:
    """A stream whose messages need a moment."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0.1)
        await self._context.write(data)


def test_a_refused_leader_that_ends_at_once_has_told_who_had_joined(
    lighthouse: LighthouseServer, replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' refusal is still on its way when rank 0's script ends of its own."""
    serve = GroupServer._serve

    async def serve_slowly(server: GroupServer, stream: Stream) -> Exception | None:
        stream._context = cast("Any", SlowWrites(stream._context))
        return await serve(server, stream)

    other = replica("h:1")
    other.ask()
    other.answer()
    monkeypatch.setattr(GroupServer, "_serve", serve_slowly)
    group = Group(lighthouse.address())
    for control in reversed(group.controls):  # the others wait for the lighthouse's welcome
        control.start()
    group.recorders[0].wait("refused")
    group.controls[0].shutdown()
    for recorder in group.recorders[1:]:
        assert "g:1 has 3 ranks, but h:1 has 1" in str(recorder.wait("refused")[0])
    group.close()


def test_no_rank_has_joined_before_the_lighthouse_has_welcomed_the_group(
    lighthouse: LighthouseServer, replica: Callable[..., Replica]
) -> None:
    """All ranks hear that the group is refused where they wait for their connection, whoever connects first."""
    other = replica("h:1")
    other.ask()
    other.answer()
    group = Group(lighthouse.address())
    leader, *ranks = group.controls
    for control in ranks:
        control.start()
    with pytest.raises(LighthouseError, match="did not answer within"):
        ranks[0].wait_connected(0.3)
    leader.start()
    for control in group.controls:
        with pytest.raises(FaultToleranceError, match="g:1 has 3 ranks, but h:1 has 1"):
            control.wait_connected(5)
    group.close()


def test_ranks_that_wait_inside_the_group_for_a_leader_that_is_gone_are_told_to_end(
    lighthouse: LighthouseServer,
) -> None:
    """Rank 2 waits for a quorum, which is not inside the group: it is refused after connect_s, as ever."""
    budget = TimeBudget.derive(4.0, overrides={"liveness_s": 0.4, "connect_s": 1.2})
    group = Group(lighthouse.address(), budget=budget).start()
    group.ask(2)
    group.controls[0].shutdown()
    assert "group rank 0 of g:1 is gone or frozen, and rank 1" in group.recorders[1].wait("kill")[0]
    group.recorders[2].wait("refused")
    assert group.recorders[2].of("kill") == []
    group.close()


def test_a_leader_that_never_comes_is_named() -> None:
    recorder = Recorder(Hello(ID, "g", 0, 0))
    settings = LeaseSettings("127.0.0.1:1", ID, replace(BUDGET, connect_s=0.3), setting="group rank 0's address")
    control = RankControl(settings, recorder, rank=1, world_size=SIZE)
    control.start()
    with pytest.raises(LighthouseError, match="group rank 0"):
        control.wait_connected(0.1)
    assert "group rank 0 did not answer" in str(recorder.wait("refused")[0])
    control.shutdown()


@pytest.mark.parametrize(
    ("change", "rank", "size", "words"),
    [
        ({"replica_id": "x:1"}, 1, SIZE, "not of x:1"),
        ({}, 1, 4, "world_size=4"),
        ({}, 3, SIZE, "not one of ranks"),
        ({"token": "no"}, 1, SIZE, "FT_TOKEN"),
        ({}, 2, SIZE, "two processes"),
    ],
)
def test_who_does_not_belong_is_refused(
    lighthouse: LighthouseServer, change: dict[str, str], rank: int, size: int, words: str
) -> None:
    group = Group(lighthouse.address(), token="yes" if "token" in change else "")
    if words == "two processes":
        group.start()
    else:
        group.controls[0].start()
    stranger = Recorder(Hello(ID, "g", 0, 0))
    settings = replace(LeaseSettings(group.address, ID, BUDGET), **change)  # type: ignore[arg-type]
    control = RankControl(settings, stranger, rank=rank, world_size=size)
    control.start()
    assert words in str(stranger.wait("refused")[0])
    control.shutdown()
    group.close()


def test_leaving_in_any_order_breaks_nothing(group: Group) -> None:
    for rank in (1, 0, 2):
        assert group.controls[rank].leave("done", finished=False, version=Version(3, 1), agreed=True, timeout_s=5)
    for recorder in group.recorders:
        assert recorder.of("member_lost") == []


def test_a_group_of_one_needs_nobody(lighthouse: LighthouseServer) -> None:
    recorder = Recorder(Hello("s:1", "s", 0, 0))
    control: Control = LocalControl(LeaseSettings(lighthouse.address(), "s:1", BUDGET), recorder)
    control.start()
    control.wait_connected(5)
    vote = Verdict(1, 2, COMMIT)
    assert control.vote(vote, 0.0) is vote
    control.break_group(1, "mine alone")
    control.shutdown()
    assert recorder.of("member_lost") == []


# ------------------------------------------------------------ draining


@pytest.mark.parametrize("rank", [0, 1])
def test_a_drain_of_one_rank_is_told_to_all(group: Group, rank: int) -> None:
    group.controls[rank].drain("SIGTERM")
    assert [recorder.wait("drain") for recorder in group.recorders] == [("SIGTERM",)] * SIZE
    for number in range(SIZE):  # these ranks do not end by themselves: they may go on
        group.ask(number)
    group.answers()


def test_a_rank_without_its_leader_drains_alone(group: Group) -> None:
    group.controls[0].shutdown()
    group.recorders[1].wait("member_lost")
    group.controls[1].drain("SIGTERM")
    assert group.recorders[1].wait("drain") == ("SIGTERM",)


def test_a_group_that_drains_asks_no_more(lighthouse: LighthouseServer, replica: Callable[..., Replica]) -> None:
    """Otherwise one rank could give up waiting, and another still enter the quorum."""
    group = Group(lighthouse.address(), drains=True).start()
    other = replica("h:1", expected=2, group_world_size=SIZE)
    other.lease.wait_connected(5)
    for rank in range(SIZE):
        group.ask(rank)
    for rank in range(SIZE):
        group.recorders[rank].wait("reason")  # the other one has not asked yet
    group.controls[2].drain("SIGTERM")
    for recorder in group.recorders:
        recorder.wait("drain")
    other.ask()
    assert other.answer().ids == (ID, "h:1")
    group.ask(1)  # late: told again
    group.recorders[1].wait("drain", lambda _: len(group.recorders[1].of("drain")) == 2)
    assert [recorder.of("quorum") for recorder in group.recorders] == [[], [], []]
    group.controls[0].leave("drained: SIGTERM", finished=False, version=VOID, agreed=False, timeout_s=5)
    assert other.recorder.wait("member_lost")[1] == (ID,)
    group.close()
