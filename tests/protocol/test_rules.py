"""Rules of DESIGN 3.9 that change what is lost or how long something takes, not what is true.

The simulation cannot find them missing, so each has a scenario that fails without it (the others: tests/simulation).
"""

from __future__ import annotations

from dataclasses import replace

from ft_core.errors import CollectiveError
from ft_core.protocol.lighthouse.crash_backoff import CRASH_DELAY_S, CRASH_FREE
from ft_core.protocol.lighthouse.events import Left
from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.phases import MustAsk, Phase
from ft_core.protocol.rank.settings import RankRules
from ft_core.protocol.types import VOID, Outcome, Version
from tests.protocol.rig import Rig, new_rank, trained
from tests.protocol.test_room import LIVENESS, Script


def test_r6_a_version_is_stable_only_once_everybody_was_seen_to_hold_it() -> None:
    rig = Rig("ab")
    rig.form()
    assert rig["a"].held.stable == VOID
    rig.attempt()
    assert rig["a"].held.stable == Version(0, 0), "step 1 is committed, but b may not have seen that"
    committed = rig["a"].held.version
    rig.handle("b", on.SoftError(ValueError("a veto publishes too")))
    rig.attempt()
    assert rig["a"].held.stable == committed
    rig.sums()
    rig.fail("b")
    assert rig["b"].held.stable == committed


def test_r10_roles_switch_only_when_every_planned_heal_is_ready() -> None:
    for ready_rule, switched in ((True, False), (False, True)):
        rules = RankRules(r10_ready=ready_rule)
        rig = trained("ab", rules=rules)
        rig.fail()
        rig.ranks["c"] = new_rank("c", rules=rules)
        rig.form(heal=False)
        assert rig.attempt() == {"a": True, "b": True, "c": False}
        assert rig["a"].attempt.roles_switched is switched


def test_r11_a_healing_member_never_vetoes() -> None:
    rig = trained("ab")
    rig.fail()
    rig.ranks["c"] = new_rank("c")
    rig.form(heal=False)
    garbage = ValueError("its loss is garbage: it computes on an untrained model")
    rig.handle("c", on.SoftError(garbage), on.ReceiveFailed(rig["c"].quorum_id, CollectiveError("too slow")))
    assert rig.attempt() == {"a": True, "b": True, "c": False}
    assert [r.boundary() for r in rig.ranks.values()] == [
        MustAsk("a member asked for a change of membership", failed=False),
        MustAsk("a member asked for a change of membership", failed=False),
        MustAsk("left behind by a commit", failed=False),
    ]  # fmt: skip


def test_r12_no_rank_applies_a_commit_that_another_rank_of_its_group_cannot() -> None:
    """Found as I6: should_commit returned True on one rank and False on the other."""
    rig = trained("ab", group_world_size=2)
    verdict = rig.count()["a"]
    assert not rig["a"].settle(replace(verdict, behind=True)).commit
    assert rig["a"].boundary() == MustAsk("left behind by a commit", failed=False)


def test_r13_without_healing_a_member_behind_waits_and_never_commits() -> None:
    rig = Rig("ab")
    rig.form(allow_heal=False, init_sync=False)
    assert rig.attempt() == {"a": True, "b": True}
    rig.fail()
    rig.ranks["c"] = new_rank("c")
    plans = rig.form(allow_heal=False)
    assert plans["c"].excluded
    assert rig.attempt() == {"a": True, "b": True, "c": False}
    assert rig["a"].divisor(rig.count()["a"]) == 2


def test_r14_a_quorum_is_configured_at_most_once() -> None:
    rig = Rig("ab")
    plans = rig.form()
    up = on.GroupsUp(plans["a"].quorum_id)
    assert rig.handle("a", up) == ()
    rig.fail("b", "configure failed")
    assert rig.handle("b", up) == ()
    assert rig["b"].phase is Phase.BROKEN


def test_r15_events_of_another_quorum_do_not_touch_this_one() -> None:
    for rule in (True, False):
        rig = Rig("ab", rules=RankRules(r15_stale=rule))
        quorum_id = rig.form()["a"].quorum_id - 1
        assert rig["a"].handle(on.MemberLost(quorum_id, ("c",)), 0.0) == () or not rule
        assert rig["a"].phase is (Phase.OPEN if rule else Phase.BROKEN)


def test_r15_crash_looping_joiners_are_debounced_and_a_supervisors_word_counts_as_a_crash() -> None:
    script = Script()
    script.train("a")
    for number in range(CRASH_FREE + 1):
        script.hello(f"b:{number}")
        script.ask(f"b:{number}")
        script.ends(f"b:{number}")
        script.later(0.2)
    script.hello("b:9")
    assert not [text for text in script.ask("b:9") if text.startswith("change")]
    assert "change -> a: b:9 wants to join" in script.later(CRASH_DELAY_S)


def test_r16_an_agreed_goodbye_disturbs_nobody_and_a_sudden_one_is_told() -> None:
    for agreed in (True, False):
        script = Script()
        script.train("a", "b")
        out = script.do(Left("b", 1, "drained", False, Version(1, 1), agreed))
        assert ("lost b -> a" in out) is not agreed
        assert script.room.records["b"].life is Life.GONE
        assert script.ask("a", 1)[0] == "quorum a -> a#2"


def test_r16_all_exhausted_is_a_stop_not_a_veto_loop() -> None:
    rig = Rig("ab")
    rig.form()
    rig.all(on.DataEnded(applies=True, ends=False))
    verdict = rig.count()["a"]
    assert (verdict.outcome, verdict.exhausted, verdict.reason) == (Outcome.VETO, True, "every member is out of data")


def test_r2_a_frozen_holder_is_waited_for_and_named() -> None:
    script = Script()
    script.train("a", "b")
    script.progress("b", 7, phase="launched")
    script.ends("b", silence_s=LIVENESS)
    assert script.ask("a", 6, failed=True)[0] == (
        "tell a: b holds step 7, newer than the step 6 of those who ask (silent: frozen or cut off, last seen in "
        "launched); it is waited for until it returns, its supervisor reports its end, or it has been away for 60 s "
        "(orphan_s)"
    )
    assert script.later(59.0) == []
    assert script.later(2.0)[0] == "quorum a -> a#2"
