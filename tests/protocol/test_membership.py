"""`rank.Membership`: how a rank asks, how its process groups form, how it loses its quorum."""

from __future__ import annotations

from typing import Any

import pytest

from ft_core.errors import CollectiveError, LighthouseError, QuorumTimeoutError, RefusedError
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.departure import DrainedError
from ft_core.protocol.rank.formation import ASK_AGAIN_S, TELL_S
from ft_core.protocol.rank.phases import Go, Heal, MustAsk, Phase
from ft_core.protocol.rank.state import MYSELF
from ft_core.protocol.types import VOID, Quorum, Version
from tests.protocol.rig import QUORUM_S, CheckedRank, Rig, kinds, member, new_rank, only, trained, wish

REFUSED = RefusedError("another model")
LIMIT = f"no quorum within {QUORUM_S:g} s (quorum_timeout): "


def asking(**wanted: Any) -> CheckedRank:
    """A rank that waits for its first quorum since 0 s."""
    rank = new_rank("a")
    rank.handle(on.QuorumWanted(wish(**wanted)), 0.0)
    return rank


def forming(*others: str, quorum_id: int = 7) -> CheckedRank:
    """A rank whose first quorum has been announced at 0 s; its process groups are being built."""
    rank = asking()
    rank.handle(answer(rank, *others, quorum_id=quorum_id), 0.0)
    return rank


def answer(rank: CheckedRank, *others: str, quorum_id: int = 7) -> on.QuorumAnswered:
    names = sorted(["a", *(others or ("b",))])
    return on.QuorumAnswered(rank.asks, Quorum(quorum_id, tuple(member(name) for name in names)))


def failed(rank: CheckedRank) -> str:
    return f"{type(rank.failure).__name__}: {rank.failure}"


# ---------------------------------------------------------------- asking


def test_what_is_asked_for() -> None:
    rank = new_rank("a", min_replicas=2, group_world_size=1)
    rank.describe(17)
    wanted = wish(store_address="h:1", heals_before_forward=True)
    (sent,) = rank.handle(on.QuorumWanted(wanted), 0.0)
    assert isinstance(sent, do.SendAsk)
    ask = sent.ask
    assert (sent.room, ask.replica_id, ask.seq, ask.reason, ask.failed) == ("room", "a", 1, "joining", False)
    assert (ask.store_address, ask.heals_before_forward, ask.signature, ask.min_replicas) == ("h:1", True, 17, 2)
    assert (ask.version, ask.lineage, ask.stable, ask.quorum_id) == (Version(0, 0), 1, VOID, 0)
    assert (rank.phase, rank.forming, rank.boundary()) == (Phase.ASKING, True, Go())
    assert rank.handle(on.QuorumWanted(wanted), 0.0) == (), "there will be one"


def test_a_rank_that_asks_again_tells_what_it_leaves() -> None:
    rig = trained()
    rig.handle("a", on.SoftError(ValueError("NaN")))
    rig.attempt()
    quorum_id = rig["a"].quorum_id
    rig.fail("a", "a bucket failed")
    ask = rig.ask("a")
    assert (ask.quorum_id, ask.failed, ask.reason, ask.commit_failures) == (quorum_id, True, "a bucket failed", 1)
    assert (ask.version, ask.stable) == (rig["a"].held.version, rig["a"].held.version)
    assert not ask.from_scratch
    restored = new_rank("a")
    restored.handle(on.Restored(Version(0, 0), 5, 0), 0.0)
    assert only(restored.handle(on.QuorumWanted(wish()), 0.0), do.SendAsk).ask.from_scratch, "R21"


def test_who_stays_asks_for_nothing_and_who_must_not_stay_ends_what_others_wait_in() -> None:
    rig = trained()
    assert rig.handle("a", on.QuorumWanted(wish())) == ()
    assert rig["a"].phase is Phase.OPEN
    quorum_id, room = rig["a"].quorum_id, MustAsk("changing to room 2", failed=False)
    abort, sent = rig.handle("a", on.QuorumWanted(wish(), room))
    assert (abort, kinds([sent])) == (do.Abort(quorum_id), ["SendAsk"]), "the others may wait in a collective"
    assert rig["a"].formation is not None
    assert rig["a"].formation.why == room
    rig["b"].may_launch(0.0)
    assert kinds(rig.handle("b", on.QuorumWanted(wish()))) == ["Abort", "SendAsk"], "R4: should_commit was skipped"
    rig.handle("c", on.ChangePending(quorum_id, "d wants to join"))
    rig.count("c")
    rig["c"].settle(rig["c"].own_vote())
    assert kinds(rig.handle("c", on.QuorumWanted(wish()))) == ["Abort", "SendAsk"]


def test_who_was_agreed_to_ask_ends_nothing() -> None:
    rig = trained()
    rig.all(on.ChangePending(rig["a"].quorum_id, "d wants to join"))
    rig.attempt()
    assert [kinds(rig.handle(n, on.QuorumWanted(wish()))) for n in "abc"] == [["SendAsk"]] * 3


def test_live_state_is_copied_before_the_first_ask_and_nothing_is_timed_meanwhile() -> None:
    rank = new_rank("a")
    assert rank.handle(on.QuorumWanted(wish(prefetch=True)), 0.0) == (do.Prefetch(QUORUM_S / 2),)
    assert rank.next_at == float("inf")
    assert rank.handle(on.Tick(), 2 * QUORUM_S) == ()
    assert kinds(rank.handle(on.PrefetchEnded(), 3 * QUORUM_S)) == ["SendAsk"]
    assert rank.handle(on.PrefetchEnded(), 3 * QUORUM_S) == (), "once"
    assert rank.next_at == 3 * QUORUM_S + TELL_S
    assert [do.LookAtLinks()] == [*rank.handle(on.Tick(), 4 * QUORUM_S - 0.1)], "the limit is one of the quorum's"
    assert rank.handle(on.Tick(), 4 * QUORUM_S) == ()
    assert failed(rank) == f"QuorumTimeoutError: {LIMIT}the lighthouse gave no reason"
    assert rank.handle(on.PrefetchEnded(), 4 * QUORUM_S) == ()


def test_state_that_nobody_can_send_ends_the_wait() -> None:
    rank = asking(prefetch=True)
    assert rank.handle(on.PrefetchEnded(CollectiveError("no class Foo here")), 0.0) == ()
    assert (rank.phase, failed(rank)) == (Phase.OUTSIDE, "CollectiveError: no class Foo here")


def test_why_there_is_no_quorum_is_told_when_it_lasts_and_is_news() -> None:
    rank = asking()
    rank.handle(on.NoQuorumYet("waiting for b"), 0.5)
    assert (rank.next_at, rank.handle(on.Tick(), 0.9)) == (TELL_S, ())
    told = do.Report("waiting for a quorum: waiting for b", warns=True)
    assert rank.handle(on.Tick(), 1.0) == (told,)
    assert (rank.next_at, rank.handle(on.Tick(), 2.0)) == (2.0, ()), "once"
    rank.handle(on.NoQuorumYet("waiting for c"), 2.5)
    assert rank.handle(on.Tick(), 3.0) == (do.Report("waiting for a quorum: waiting for c", warns=True),)
    assert rank.handle(on.Tick(), QUORUM_S) == ()
    assert failed(rank) == f"QuorumTimeoutError: {LIMIT}waiting for c"


def test_the_limit_is_the_scripts_and_the_way_to_the_lighthouse_may_know_why() -> None:
    rank = asking(timeout_s=2.0)
    rank.handle(on.NoQuorumYet("waiting for b"), 0.5)
    rank.handle(on.Tick("the lighthouse at h:1 does not answer"), 2.0)
    assert isinstance(rank.failure, QuorumTimeoutError)
    assert str(rank.failure) == "no quorum within 2 s (quorum_timeout): the lighthouse at h:1 does not answer"
    assert (rank.phase, rank.forming, rank.next_at) == (Phase.OUTSIDE, False, float("inf"))
    assert kinds(rank.handle(on.QuorumWanted(wish()), 2.0)) == ["SendAsk"]
    assert (repr(rank.failure), rank.asks, rank.reason) == ("None", 2, "")


def test_a_pause_of_somebody_that_is_waited_for_extends_the_limit() -> None:
    rank = asking(timeout_s=5.0)
    rank.handle(on.NoQuorumYet("waiting for b, which saves", paused_s=60.0), 4.0)
    rank.handle(on.Tick(), 5.0)
    assert rank.forming
    rank.handle(on.NoQuorumYet("waiting for b", paused_s=0.0), 20.0)
    rank.handle(on.Tick(), 24.9)
    assert rank.forming, "it is back: from then on the whole limit"
    rank.handle(on.Tick(), 25.0)
    assert not rank.forming


def test_a_rank_that_got_no_quorum_is_broken_for_its_first_reason() -> None:
    rig = trained()
    rig.fail("a", "a bucket failed")
    rig.all(on.ChangePending(rig["b"].quorum_id, "d wants to join"), "b")
    rig.attempt("b")
    for name, reason in (("a", "a bucket failed"), ("b", "the fence shows that a member is in another attempt")):
        rank = rig[name]
        rig.ask(name)
        assert rank.broken
        rank.handle(on.Tick(), QUORUM_S)
        assert (rank.phase, rank.failure is not None) == (Phase.BROKEN, True)
        assert rank.broken_reason.startswith(reason)
    changes = trained("a")
    changes.handle("a", on.ChangePending(changes["a"].quorum_id, "b wants to join"))
    changes.attempt()
    changes.ask("a")
    assert not changes["a"].broken
    changes["a"].handle(on.Tick(), QUORUM_S)
    assert changes["a"].boundary() == MustAsk(f"{LIMIT}the lighthouse gave no reason", failed=True)


# ---------------------------------------------------------------- links


def test_news_of_links_goes_into_the_ask_that_is_open_and_links_are_looked_at_until_all_are_whole() -> None:
    rank = forming("b")
    rank.handle(on.GroupsFailed(7, "timed out", here=False), 0.0)
    rank.handle(on.LinksSeen(("b",), ()), 0.0)
    ask = only(rank.handle(on.Tick(), ASK_AGAIN_S), do.SendAsk).ask
    assert (ask.seq, ask.unreachable, ask.reached) == (2, ("b",), ())
    look = ASK_AGAIN_S + rank.settings.look_s
    assert rank.handle(on.LinksSeen(("b",), ()), 1.0) == (), "no news"
    assert do.LookAtLinks() not in rank.handle(on.Tick(), look - 0.1)
    assert rank.handle(on.Tick(), look) == (do.LookAtLinks(),)
    ask = only(rank.handle(on.LinksSeen((), ("b",)), look), do.SendAsk).ask
    assert (ask.seq, ask.unreachable, ask.reached) == (2, (), ("b",)), "the answer to it may be on its way, and holds"
    for at in range(6, int(QUORUM_S)):
        assert rank.handle(on.Tick(), float(at)) == (), "all are whole"
    stale = on.QuorumAnswered(1, Quorum(9, (member("a"), member("b"))))
    assert rank.handle(stale, 29.0) == (), "an answer to what is not asked any more"
    assert kinds(rank.handle(answer(rank, quorum_id=9), 29.0)) == ["Entered", "Offer", "Configure"]
    assert rank.links == ((), ())


def test_links_of_long_ago_are_no_news_and_what_is_seen_before_an_ask_goes_with_it() -> None:
    for age, told in ((4.0, ("b",)), (6.0, ())):
        rig = trained("ab")
        assert rig.handle("a", on.LinksSeen(("b",), ())) == ()
        rig.now = age
        rig.fail("a")
        assert rig.ask("a").unreachable == told


# ---------------------------------------------------------------- forming


def test_an_answer_begins_a_quorum_and_its_groups_open_it() -> None:
    rank = asking()
    rank.handle(on.Paused(0, MYSELF, 20.0), 1.0)
    rank.handle(on.Paused(3, "x", 20.0), 1.0)
    actions = rank.handle(answer(rank), 2.0)
    plan = rank.plan
    assert plan is not None
    assert actions == (do.Entered(plan), do.Offer(plan), do.Configure(plan))
    assert (rank.phase, rank.forming, rank.quorum_id, rank.next_at) == (Phase.FORMING, True, 7, float("inf"))
    assert rank.pauses.open(2.0) == {MYSELF: 19.0}, "those of members are announced anew"
    assert rank.handle(on.Tick(), 99.0) == (), "building has a limit of its own"
    assert rank.handle(answer(rank), 2.0) == (), "once"
    assert rank.handle(on.GroupsUp(7), 3.0) == ()
    assert (rank.phase, rank.forming, rank.boundary()) == (Phase.OPEN, False, Go())


def test_an_answer_that_leaves_this_replica_out_ends_the_wait() -> None:
    rank = asking()
    assert rank.handle(on.QuorumAnswered(1, Quorum(7, (member("b"),))), 0.0) == ()
    assert (rank.phase, failed(rank)) == (Phase.OUTSIDE, "ValueError: a is not a member of quorum 7")


@pytest.mark.parametrize("here", [True, False])
def test_groups_that_cannot_be_built_are_asked_for_anew(here: bool) -> None:
    rank = forming()
    why = "the process group could not be built: b refuses"
    assert rank.handle(on.GroupsFailed(7, "b refuses", here), 1.0) == (
        do.Abort(7), do.TellGroup(7, why), do.Report(f"asking again: {why}"),
    )  # fmt: skip
    assert (rank.phase, rank.broken, rank.next_at) == (Phase.ASKING, True, 1.0 + ASK_AGAIN_S)
    assert rank.handle(on.GroupsUp(7), 1.0) == (), "R14: configured at most once"
    assert rank.handle(on.GroupsFailed(7, "again", here), 1.0) == ()
    assert rank.handle(on.Tick(), 1.0) == (), "the messages that explain it may arrive"
    ask = only(rank.handle(on.Tick(), 1.0 + ASK_AGAIN_S), do.SendAsk).ask
    assert (ask.seq, ask.failed, ask.reason, ask.quorum_id) == (2, True, why, 7)
    assert (ask.unbuilt, ask.unbuilt_here) == ("b refuses", here)
    assert kinds(rank.handle(answer(rank, quorum_id=8), 2.0)) == ["Entered", "Offer", "Configure"]
    assert (rank.unbuilt, rank.unbuilt_here, rank.broken_reason, rank.quorum_id) == ("", False, "", 8)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (on.MemberLost(7, ("b",)), "lost b"),
        (on.MemberLost(7, ("b",), Version(0, 0)), "left by b"),
        (on.Superseded(7), "the other replicas have formed a newer quorum"),
        (on.PeerEnded(7), "a peer has ended its connection"),
        (on.CollectiveFailed(CollectiveError("a bucket failed")), "a bucket failed"),
    ],
)
def test_a_quorum_that_ends_while_it_forms_is_nobodys_fault_here(event: on.Event, why: str) -> None:
    rank = forming()
    actions = rank.handle(event, 1.0)
    assert actions[:3] == (do.Abort(7), do.TellGroup(7, why), do.Report(f"asking again: {why}"))
    assert rank.handle(on.GroupsFailed(7, "aborted", here=False), 1.0) == ()
    ask = only(rank.handle(on.Tick(), 1.0 + ASK_AGAIN_S), do.SendAsk).ask
    assert (ask.failed, ask.reason, ask.unbuilt) == (True, why, "")


def test_a_collective_of_an_earlier_quorum_ends_nothing() -> None:
    """The thread that found it looked at the network for seconds (R15)."""
    rank = forming()
    assert rank.handle(on.CollectiveFailed(CollectiveError("a peer did not take part"), 6), 1.0) == ()
    assert rank.phase is Phase.FORMING
    assert rank.handle(on.CollectiveFailed(CollectiveError("a peer did not take part"), 7), 1.0) != ()


def test_the_limit_is_one_for_all_quorums_of_a_wait() -> None:
    rank = forming()
    rank.handle(on.GroupsFailed(7, "b refuses", here=False), QUORUM_S)
    assert failed(rank) == (
        f"QuorumTimeoutError: no usable quorum within {QUORUM_S:g} s: the process group could not be built: b refuses"
    )
    assert (rank.phase, rank.forming) == (Phase.BROKEN, False)
    assert rank.boundary() == MustAsk("the process group could not be built: b refuses", failed=True)


def test_news_that_overtake_the_answer_are_kept_for_their_quorum() -> None:
    for early in (on.MemberLost(7, ("b",)), on.Superseded(7)):
        rank = asking()
        assert rank.handle(on.MemberLost(3, ("x",)), 0.0) == ()
        assert rank.handle(on.ChangePending(7, "c wants to join"), 0.0) == ()
        assert rank.handle(early, 0.0) == ()
        actions = rank.handle(answer(rank), 0.0)
        assert kinds(actions) == ["Entered", "Offer", "Abort", "TellGroup", "Report"], "nothing is built any more"
        assert rank.phase is Phase.ASKING
    rank = asking()
    for quorum_id, reason in ((7, "c wants to join"), (9, "d wants to join"), (8, "e wants to join")):
        rank.handle(on.ChangePending(quorum_id, reason), 0.0)
    rank.handle(answer(rank), 0.0)
    assert rank.change_wanted == "", "the newest is of the next one"
    rank.handle(on.ChangePending(7, "f wants to join"), 0.0)
    assert rank.change_wanted == "f wants to join"
    rank.handle(on.GroupsFailed(7, "b refuses", here=False), 0.0)
    rank.handle(on.Tick(), 1.0)
    rank.handle(answer(rank, quorum_id=9), 1.0)
    assert rank.change_wanted == "d wants to join"


def test_what_was_reported_while_the_quorum_formed_is_of_its_first_attempt() -> None:
    rank = forming("b")
    rank.handle(on.SoftError(ValueError("NaN")), 0.0)
    rank.handle(on.MemberLost(7, ("b",)), 0.0)
    rank.handle(on.Tick(), 1.0)
    rank.handle(answer(rank, quorum_id=8), 1.0)
    assert (rank.attempt.soft_error, str(rank.error)) == ("ValueError: NaN", "NaN")


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("event", "told", "failure"),
    [
        (on.Refused(REFUSED), [], "RefusedError: another model"),
        (on.ShutDown(), [], "LighthouseError: the manager was shut down while it waited for a quorum"),
        (on.DrainOrdered(""), ["Report", "CancelReceive"], "DrainedError: this replica drains and waits for no quorum"),
    ],
)
@pytest.mark.parametrize("prefetch", [True, False])
def test_who_ends_waits_for_no_quorum(event: on.Event, told: list[str], failure: str, prefetch: bool) -> None:
    rank = new_rank("a", exits_on_drain=True)
    rank.handle(on.QuorumWanted(wish(prefetch=prefetch)), 0.0)
    assert kinds(rank.handle(event, 1.0)) == told
    assert (rank.phase, failed(rank)) == (Phase.OUTSIDE, failure)
    assert rank.handle(on.PrefetchEnded(), 1.0) == ()
    assert rank.handle(on.QuorumWanted(wish()), 1.0) == ()
    assert (rank.phase, failed(rank), rank.asks) == (Phase.OUTSIDE, failure, int(not prefetch)), "nor for the next"


@pytest.mark.parametrize("event", [on.Refused(REFUSED), on.DrainOrdered("")])
def test_who_ends_while_its_groups_are_built_asks_no_more(event: on.Event) -> None:
    rank = new_rank("a", exits_on_drain=True)
    rank.handle(on.QuorumWanted(wish()), 0.0)
    rank.handle(answer(rank), 0.0)
    rank.handle(event, 0.0)
    rank.handle(on.GroupsFailed(7, "aborted", here=False), 0.0)
    assert (rank.phase, rank.forming, rank.next_at) == (Phase.BROKEN, False, float("inf"))
    assert isinstance(rank.failure, (RefusedError, LighthouseError, DrainedError))


def test_a_shutdown_ends_every_wait_for_what_the_worker_was_to_bring() -> None:
    """The thread that builds process groups and receives state ends with the Manager: nobody would wake the script."""
    forms = forming()
    assert kinds(forms.handle(on.ShutDown(), 0.0)) == ["Abort", "TellGroup"]
    assert (forms.phase, forms.forming, forms.next_at) == (Phase.BROKEN, False, float("inf"))
    assert isinstance(forms.failure, LighthouseError)
    assert forms.handle(on.GroupsUp(forms.quorum_id), 0.0) == ()
    assert forms.phase is Phase.BROKEN
    rig = Rig("ab")
    rig.form(heal=False)
    assert rig["b"].receiving
    assert kinds(rig.handle("b", on.ShutDown())) == ["Abort", "TellGroup"]
    assert (rig["b"].phase, rig["b"].receiving) == (Phase.BROKEN, False)


def test_work_that_raises_what_nobody_expected_ends_the_wait_for_it() -> None:
    """Asking again would fail again, and without an answer the script would wait for ever."""
    full = MemoryError("can't allocate memory")
    asks, forms = asking(), forming()
    assert asks.handle(on.WorkFailed(full), 0.0) == ()
    assert (asks.phase, asks.failure, asks.forming) == (Phase.OUTSIDE, full, False)
    assert kinds(forms.handle(on.WorkFailed(full), 0.0)) == ["Abort", "TellGroup"]
    assert (forms.phase, forms.failure, forms.forming) == (Phase.BROKEN, full, False)
    rig = Rig("ab")
    rig.form(heal=False)
    assert kinds(rig.handle("b", on.WorkFailed(full))) == ["Abort", "TellGroup"]
    assert (rig["b"].phase, rig["b"].failure, rig["b"].receiving) == (Phase.BROKEN, full, False)
    assert rig.handle("a", on.WorkFailed(full)) == (), "nothing waits for it"
    assert rig["a"].phase is Phase.OPEN


def test_a_drain_ends_a_heal_that_has_not_begun_to_receive() -> None:
    """The worker comes to it later, and would receive everything: the order to end what is received came before."""
    rig = Rig("ab", exits_on_drain=True)
    rig.form(heal=False)
    assert rig["b"].receiving
    assert kinds(rig.handle("b", on.DrainOrdered("SIGTERM"))) == ["Report", "CancelReceive"]
    assert (rig["b"].receiving, rig["b"].attempt.heal, rig["b"].phase) == (False, Heal.ABANDONED, Phase.OPEN)


def test_a_refusal_breaks_the_quorum_that_stands() -> None:
    rig = trained()
    assert kinds(rig.handle("a", on.Refused(REFUSED), on.Refused(RefusedError("later")))) == ["Abort", "TellGroup"]
    assert (rig["a"].refused, rig["a"].error, rig["a"].broken_reason) == (REFUSED, REFUSED, "another model")


def test_an_order_to_drain_that_the_script_decides_on_ends_no_wait() -> None:
    rank = asking()
    assert kinds(rank.handle(on.DrainOrdered("maintenance"), 0.0)) == ["Report"]
    assert (rank.phase, rank.draining, rank.departure.drain_wanted) == (Phase.ASKING, False, True)


def test_who_drains_and_hands_over_asks_all_the_same() -> None:
    rig = trained(exits_on_drain=True)
    rig.handle("a", on.DrainOrdered("maintenance"))
    rig.fail("a", "a peer died")
    assert rig["a"].hands_over() == MustAsk("a peer died", failed=True)
    abort, sent = rig.handle("a", on.QuorumWanted(wish(hands_over=True)))
    assert kinds([abort, sent]) == ["Abort", "SendAsk"]
    rig.fail("b")
    quorum = rig.quorum([only([sent], do.SendAsk).ask, rig.ask("b")])
    assert kinds(rig.answer("a", quorum)) == ["Entered", "Offer", "Configure"]
    assert rig["a"].phase is Phase.OPEN


# ---------------------------------------------------------------- state


def test_planned_state_is_received_once_the_groups_stand() -> None:
    rig = trained("ab")
    rig.fail()
    rig.handle("b", on.StateTorn())
    quorum = rig.quorum([rig.ask("a"), rig.ask("b")])
    rig.heals = False
    actions = rig.answer("b", quorum)
    assert kinds(actions) == ["Entered", "Offer", "Configure", "Receive"]
    rank = rig["b"]
    assert (rank.receiving, rank.attempt.heal) == (True, Heal.PENDING)
    rig.handle("b", on.StateReceived(rank.quorum_id))
    assert (rank.receiving, rank.attempt.heal, rank.attempt.contributes) == (False, Heal.READY, False)


def test_who_drains_receives_nothing() -> None:
    rig = Rig("ab", exits_on_drain=True)
    quorum = rig.quorum([rig.ask("a"), rig.ask("b")])
    rank = rig["b"]
    rank.handle(on.QuorumAnswered(rank.asks, quorum), 0.0)
    rank.handle(on.DrainOrdered("maintenance"), 0.0)
    assert rank.handle(on.GroupsUp(quorum.quorum_id), 0.0) == ()
    assert (rank.phase, rank.attempt.heal) == (Phase.OPEN, Heal.ABANDONED)
    assert rank.change_wanted == "healing failed: this replica drains"


def test_a_heal_that_fails_is_asked_for_again_and_one_that_nobody_can_give_ends_this_replica() -> None:
    nobody = CollectiveError("no donor")
    rig = Rig("ab")
    rig.form(heal=False)
    rank = rig["b"]
    report = do.Report("healing failed, asking again: no donor", warns=True)
    assert rig.handle("b", on.ReceiveFailed(rank.quorum_id, nobody)) == (report,)
    assert (rank.attempt.heal, rank.change_wanted, rank.retries.own_failures) == (
        Heal.ABANDONED, "healing failed: no donor", 1,
    )  # fmt: skip
    assert rig.handle("b", on.ReceiveFailed(rank.quorum_id, nobody)) == (), "once"
    rig = Rig("ab")
    rig.form(heal=False)
    assert kinds(rig.handle("b", on.ReceiveFailed(rig["b"].quorum_id, nobody, final=True))) == ["Abort", "TellGroup"]
    assert (rig["b"].phase, rig["b"].failure, rig["b"].error) == (Phase.BROKEN, nobody, nobody)


def test_state_that_nobody_can_give_also_ends_the_wait_for_the_next_quorum() -> None:
    rig = Rig("ab")
    rig.form(heal=False)
    rig.fail("b")
    rig.ask("b")
    refused = CollectiveError("no class Foo here")
    assert rig.handle("b", on.ReceiveFailed(rig["b"].quorum_id, refused, final=True)) == ()
    assert (rig["b"].phase, rig["b"].failure, rig["b"].forming) == (Phase.BROKEN, refused, False)


def test_state_that_comes_after_its_quorum_is_not_taken() -> None:
    rig = Rig("ab")
    rig.form(heal=False)
    rig.fail("b")
    assert rig.handle("b", on.StateReceived(rig["b"].quorum_id)) == ()
    assert rig["b"].attempt.heal is Heal.PENDING


def test_a_newcomer_is_given_live_state_by_who_waits_at_a_boundary() -> None:
    assert asking().handle(on.StateWanted(), 0.0) == (do.OfferLive(),)
    for rank in (new_rank("a"), forming(), trained()["a"]):
        assert rank.handle(on.StateWanted(), 0.0) == ()
