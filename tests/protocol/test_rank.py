"""`rank.Step`: what each transition allows, and that a verdict is a function of the sum alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.protocol.lineage import fold_lineage
from ft_core.protocol.rank.ballot import (
    CONTRIBUTED,
    COUNT,
    EXHAUSTED,
    FENCE_SLOTS,
    MAX_WEIGHT,
    NO_LEASE,
    TAG0,
    WEIGHT_HIGH,
    WEIGHT_LOW,
)
from ft_core.protocol.rank.handover import hands_over
from ft_core.protocol.rank.heal_plan import WorldSizeMode
from ft_core.protocol.rank.phases import Go, Heal, MustAsk, Phase
from ft_core.protocol.types import VOID, Outcome, Verdict, Version
from tests.protocol.rig import Rig, new_step


def test_three_untrained_replicas_start_from_one_state_and_all_contribute() -> None:
    rig = Rig()
    plans = rig.form()
    assert [plans[n].heals for n in "abc"] == [False, True, True]
    assert len({s.lineage for s in rig.steps.values()}) == 1
    assert rig.attempt() == dict.fromkeys("abc", True)
    versions = {s.version for s in rig.steps.values()}
    assert versions == {Version(1, rig["a"].plan.quorum_id)}  # type: ignore[union-attr]
    assert rig["a"].batches_committed == 3
    assert all(isinstance(s.boundary(), Go) for s in rig.steps.values())


def test_a_newcomer_sends_zeros_once_and_contributes_from_the_next_attempt() -> None:
    rig = Rig("ab")
    rig.form()
    rig.attempt()
    for step in rig.steps.values():
        step.want_change(step.plan.quorum_id, "c wants to join")  # type: ignore[union-attr]
    rig.attempt()
    rig.steps["c"] = new_step("c", lineage=9)
    rig.form()
    assert not rig["c"].participating
    verdict = rig.fence()["a"]
    assert (verdict.weight, verdict.contributors, verdict.healed) == (2, 2, True)
    rig["c"].heal_applied(None, 0, 0)
    assert [s.settle(s.verdict) for s in rig.steps.values() if s.verdict] == [True] * 3
    assert rig.fence()["c"].contributors == 3
    assert rig["c"].participants == (0, 1, 2)


def test_boundary_says_why() -> None:
    rig = Rig("ab")
    assert rig["a"].boundary() == MustAsk("joining", failed=False)
    rig.form()
    assert rig["a"].boundary() == Go()
    rig["a"].launching(0.0)
    assert rig["a"].boundary() == MustAsk(
        "start_quorum was called while collectives of the last attempt had no completed fence", failed=True
    )
    assert rig["a"].boundary().failed, "asking again gives the same answer"  # type: ignore[union-attr]
    rig = Rig("ab")
    rig.form()
    rig.fence()
    assert rig["a"].boundary() == MustAsk(
        "the last attempt was agreed by everybody but should_commit was not called for it", failed=True
    )


def test_a_verdict_is_latched_and_a_later_push_only_asks() -> None:
    rig = Rig("ab")
    rig.form()
    verdict = rig.fence()["a"]
    step = rig["a"]
    assert not step.lost(verdict.quorum_id, "b is lost")
    assert step.judge([0.0] * FENCE_SLOTS, 0.0) is verdict
    assert step.settle(verdict)
    assert step.boundary() == MustAsk("b is lost", failed=False)
    assert not step.lost(verdict.quorum_id, "b is lost, again"), "nothing is launched and the next boundary asks"
    assert step.phase is Phase.OPEN


def test_a_broken_member_launches_nothing_and_commits_nothing() -> None:
    rig = Rig("ab")
    rig.form()
    step = rig["a"]
    assert step.lost(step.plan.quorum_id, "b is lost")  # type: ignore[union-attr]
    assert not step.launching(0.0)
    verdict = step.judge([0.0] * FENCE_SLOTS, 0.0)
    assert verdict.outcome is Outcome.BROKEN
    assert not step.settle(verdict)
    assert step.boundary() == MustAsk("b is lost", failed=True)


def test_an_error_reported_after_the_fence_was_launched_breaks_its_reporter_alone() -> None:
    rig = Rig("ab")
    rig.form()
    rig["a"].launching(0.0)
    rig["b"].launching(0.0)
    sums = [x + y for x, y in zip(rig["a"].slots(0.0), rig["b"].slots(0.0), strict=True)]
    rig["a"].fail_softly("a NaN, found late")
    mine, theirs = rig["a"].judge(sums, 0.0), rig["b"].judge(sums, 0.0)
    assert (mine.outcome, theirs.outcome) == (Outcome.BROKEN, Outcome.COMMIT)
    assert mine.reason == "reported too late to veto the others: a NaN, found late"
    rig["b"].fail_softly("found after the fence came back")
    assert rig["b"].phase is Phase.BROKEN


def test_after_its_vote_a_rank_follows_its_group_whatever_fails() -> None:
    """Found as I6: one rank applied the commit, the other reported late; the group's whole state became worthless."""
    rig = Rig("ab", group_world_size=2)
    rig.form()
    rig.fence()
    step = rig["a"]
    vote = step.vote()
    assert vote.outcome is Outcome.COMMIT
    step.fail_softly("too late altogether")
    assert not step.break_("a bucket, late")
    assert step.settle(vote)
    assert isinstance(step.boundary(), Go), "the group's other rank has not heard of it"
    assert step.vote().reason == "a bucket, late"
    rig["b"].break_("a bucket failed")
    assert rig["b"].vote().outcome is Outcome.BROKEN


def test_a_push_that_overtakes_entering_is_not_lost() -> None:
    rig = Rig("ab")
    rig.form()
    next_id = (rig.next_id + 1) << 32 | 7
    for step in rig.steps.values():
        step.break_("test")
    rig["a"].want_change(next_id, "c wants to join")
    rig["a"].lost(next_id - 1, "not about the next one")
    rig.form()
    assert rig["a"].change_wanted == "c wants to join"
    next_id = (rig.next_id + 1) << 32 | 7
    rig["b"].lost(next_id, "a is lost")
    for step in rig.steps.values():
        step.break_("test")
    with pytest.raises(AssertionError):
        rig.form()
    assert rig["b"].boundary() == MustAsk("a is lost", failed=True)


@pytest.mark.parametrize("difference", ["version", "lineage", "attempt", "layout", "user_ops"])
def test_the_tag_shows_every_difference(difference: str) -> None:
    rig = Rig()
    rig.form()
    rig.attempt()
    step = rig["b"]
    if difference == "version":
        step.base = step.version = Version(9, step.version.epoch)
    elif difference == "lineage":
        step.base_lineage = step.lineage = 12345
    else:
        setattr(step, difference, 5)
    assert {v.outcome for v in rig.fence().values()} == {Outcome.BROKEN}
    assert "another attempt or holds another state" in rig["a"].broken_reason


def test_a_missing_member_or_a_nan_is_broken_not_committed() -> None:
    rig = Rig()
    rig.form()
    assert rig.fence(tamper=[float("nan")] * FENCE_SLOTS)["a"].outcome is Outcome.BROKEN
    rig = Rig()
    rig.form()
    two = rig.fence("ab")
    assert two["a"].outcome is Outcome.BROKEN


def test_256_members_with_the_largest_weights_sum_exactly_in_float32() -> None:
    import struct

    def float32(x: float) -> float:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])

    rig = Rig([f"r{i:03}" for i in range(256)])  # type: ignore[arg-type]
    names = list(rig.steps)
    members_weight = [MAX_WEIGHT if i % 2 else 65535 for i in range(256)]
    rig.form(names)  # type: ignore[arg-type]
    slots = []
    for step, weight in zip(rig.steps.values(), members_weight, strict=True):
        step.weight = weight
        step.launching(0.0)
        slots.append(step.slots(0.0))
    sums = [0.0] * FENCE_SLOTS
    for row in slots:
        assert all(0 <= x < 65536 and x == int(x) for x in row)
        sums = [float32(a + b) for a, b in zip(sums, row, strict=True)]
    verdict = rig["r000"].judge(sums, 0.0)
    assert (verdict.outcome, verdict.weight, verdict.contributors) == (Outcome.COMMIT, sum(members_weight), 256)


def test_soft_failure_vetoes_for_all_and_rebuilds_nothing() -> None:
    rig = Rig()
    rig.form()
    rig["b"].fail_softly("NaN loss")
    verdicts = rig.fence()
    assert verdicts["b"].reason == "NaN loss"
    assert verdicts["a"].reason == "1 of 3 members failed in this step"
    assert [s.settle(verdicts[n]) for n, s in rig.steps.items()] == [False] * 3
    assert all(s.boundary() == Go() for s in rig.steps.values())
    assert rig.attempt() == dict.fromkeys("abc", True)


def test_autonomy() -> None:
    rig = Rig("ab", autonomy_s=10.0, orphan_s=15.0)
    rig.form()
    rig.now = 11.0
    rig["b"].lease_acked_at = 5.0
    assert rig.fence()["a"].outcome is Outcome.COMMIT, "one lease is enough"
    for step in rig.steps.values():
        step.settle(step.verdict)  # type: ignore[arg-type]
    rig.now = 16.0
    stable = rig["a"].stable
    verdict = rig.fence()["a"]
    assert (verdict.outcome, verdict.reason) == (
        Outcome.VETO, "no member has had a lease for autonomy_s=10 s: waiting for one",
    )  # fmt: skip
    assert rig["a"].stable == stable, "nothing is published that the room may have gone on without"


def test_a_fence_that_took_too_long_without_a_lease_is_broken() -> None:
    rig = Rig("ab", autonomy_s=10.0, orphan_s=15.0)
    rig.form()
    slots = []
    for step in rig.steps.values():
        step.launching(9.0)
        slots.append(step.slots(9.0))
    sums = [x + y for x, y in zip(*slots, strict=True)]
    assert rig["a"].judge(sums, 14.1).outcome is Outcome.BROKEN
    rig["b"].lease_acked_at = 8.0
    assert rig["b"].judge(sums, 14.1).outcome is Outcome.COMMIT


def test_out_of_data_stops_everybody_also_with_spares_and_a_member_that_cannot_heal() -> None:
    rig = Rig("ab")
    rig.form()
    rig["a"].data.exhausted = True
    verdict = rig.fence()["a"]
    assert (verdict.outcome, verdict.weight, verdict.exhausted) == (Outcome.COMMIT, 1, False)
    rig = Rig(mode=WorldSizeMode.FIXED_WITH_SPARES, min_replicas=1)
    rig.form()
    rig["a"].data.exhausted = True
    assert rig.fence()["c"].exhausted, "spares have data left, but nobody would ever use it"
    rig = Rig("ab")
    rig.form()
    rig.attempt()
    for step in rig.steps.values():
        step.break_("test")
        step.data.exhausted = True
    rig.steps["c"] = new_step("c")
    rig.form(heal=False)
    rig["c"].heal_failed(rig["c"].plan.quorum_id, "no donor")  # type: ignore[union-attr]
    assert rig.fence()["a"].exhausted


def test_stop_and_leave_reach_everybody() -> None:
    rig = Rig()
    rig.form()
    rig["b"].departure.stop_wanted = True
    assert rig.fence()["a"].stop
    rig = Rig()
    rig.form()
    rig["b"].departure.leaving = True
    rig.attempt()
    assert rig["a"].boundary() == MustAsk("a member asked for a change of membership", failed=False)


def test_max_retries_counts_a_members_own_failures_first() -> None:
    rig = Rig("ab", max_retries=2)
    rig.form()
    for _ in range(3):
        rig["b"].fail_softly("bad loss")
        rig.attempt()
    assert rig["b"].gave_up() == "3 attempts in a row failed on this replica (max_retries=2)"
    assert rig["a"].gave_up() == ""
    for _ in range(2):
        rig["b"].fail_softly("bad loss")
        rig.attempt()
    assert rig["a"].gave_up() == "5 attempts in a row were not committed (max_retries=2)"
    rig["a"].break_("test")
    rig["b"].break_("test")
    rig.form()
    assert rig["a"].gave_up() == "", "the others' counters reset with the new quorum"


def test_a_member_that_can_never_heal_gives_up_in_the_end() -> None:
    rig = Rig("ab", max_retries=2)
    rig.form()
    rig.attempt()
    for step in rig.steps.values():
        step.break_("test")
    rig.steps["c"] = new_step("c", max_retries=2)
    for _ in range(3):
        rig.form(heal=False)
        rig["c"].heal_failed(rig["c"].plan.quorum_id, "no donor")  # type: ignore[union-attr]
        assert rig.attempt() == {"a": True, "b": True, "c": False}
    assert rig["c"].gave_up() == "3 attempts in a row failed on this replica (max_retries=2)"


def test_a_torn_member_is_void_until_it_is_healed() -> None:
    rig = Rig("ab")
    rig.form()
    rig.attempt()
    for step in rig.steps.values():
        step.break_("test")
    rig["b"].tear()
    plans = rig.form(heal=False)
    assert rig["b"].version == VOID
    assert plans["b"].heals
    assert not rig["b"].contributes
    rig.receive("b", apply=True)
    assert rig["b"].version == rig["a"].version


def test_collectives_of_the_user_are_expected_as_often_as_they_come() -> None:
    rig = Rig()
    rig.form()
    step = rig["a"]
    expected = [step.expects_user_op]
    for calls in (True, True, False, False):
        if calls:
            for name in rig.steps:
                rig[name].launching_user_op()
        expected.append(step.expects_user_op)
        rig.attempt()
    assert expected == [False, True, True, True, False]


def test_who_leaves_a_broken_quorum_hands_over_what_only_it_may_hold() -> None:
    rig = Rig()
    rig.form()
    rig.attempt()
    step = rig["a"]
    assert hands_over(step) is None  # its quorum stands: the last fence tells
    step.break_("a peer died")
    why = hands_over(step)
    assert why is not None
    assert why.failed
    step.stable = step.version
    assert hands_over(step) is None
    step.stable = VOID
    step.tear()
    assert hands_over(step) is None


def test_what_is_planned_for_another_quorum_is_refused() -> None:
    rig = Rig("ab")
    rig.form(heal=False)
    assert not rig["b"].healed(12345)
    assert not rig["b"].configured(12345)
    rig["b"].heal_failed(12345, "stale")
    assert rig["b"].heal is Heal.PENDING
    assert not rig["a"].lost(12345, "stale")
    assert rig["a"].phase is Phase.OPEN


def test_slots_are_what_the_header_says() -> None:
    rig = Rig("ab")
    rig.form()
    rig["a"].weight = 70000
    row = rig["a"].slots(0.0)
    assert (row[WEIGHT_LOW], row[WEIGHT_HIGH]) == (70000 % 65536, 1.0)
    assert (row[COUNT], row[CONTRIBUTED], row[EXHAUSTED], row[NO_LEASE]) == (1.0, 1.0, 0.0, 0.0)
    assert sum(int(row[TAG0 + i]) << (16 * i) for i in range(4)) == rig["a"].tag()
    rig["a"].weight = 0
    assert rig["a"].slots(0.0)[CONTRIBUTED] == 0.0


def test_a_zero_sum_vetoes() -> None:
    rig = Rig("ab")
    rig.form()
    rig["a"].weight = rig["b"].weight = 0
    assert rig.fence()["a"].reason == "no member contributed a gradient"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, MAX_WEIGHT), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=6)
)
def test_every_member_reaches_the_same_verdict(inputs: list[tuple[int, bool, bool, bool]]) -> None:
    rig = Rig("abcdef"[: len(inputs)])
    rig.form()
    for step, (weight, soft, exhausted, leaving) in zip(rig.steps.values(), inputs, strict=True):
        step.weight, step.data.exhausted, step.departure.leaving = weight, exhausted, leaving
        if soft:
            step.fail_softly("x")
    verdicts = rig.fence()
    assert len({(v.outcome, v.weight, v.contributors, v.change, v.exhausted) for v in verdicts.values()}) == 1
    expected = sum(w for w, soft, exhausted, _ in inputs if not soft and not exhausted)
    verdict = verdicts["a"]
    assert verdict.weight == expected
    commit = expected > 0 and not any(soft for _, soft, _, _ in inputs)
    assert verdict.outcome is (Outcome.COMMIT if commit else Outcome.VETO)
    assert rig["a"].divisor(verdict) == expected


def test_lineage_depends_on_everything_in_the_history() -> None:
    base = (5, 7, 0, ("a", "b"))
    others = [(6, 7, 0, ("a", "b")), (5, 8, 0, ("a", "b")), (5, 7, 1, ("a", "b")), (5, 7, 0, ("a", "c"))]
    values = [fold_lineage(*args) for args in (base, *others)]
    assert len(set(values)) == 5
    assert all(0 <= v < 2**63 for v in values)


def test_phases_refuse_what_is_not_theirs() -> None:
    """No call in any order of a few raises or moves a step that is outside."""
    calls = ("lost", "break_", "want_change", "fail_softly", "heal_failed", "boundary", "launching", "configured")
    for sequence in itertools.permutations(calls, 3):
        step = new_step("a")
        for name in sequence:
            method = getattr(step, name)
            {
                "lost": lambda m=method: m(1, "x"), "break_": lambda m=method: m("x"),
                "want_change": lambda m=method: m(1, "x"), "fail_softly": lambda m=method: m("x"),
                "heal_failed": lambda m=method: m(1, "x"), "boundary": lambda m=method: m(),
                "launching": lambda m=method: m(0.0), "configured": lambda m=method: m(1),
            }[name]()  # fmt: skip
        assert step.phase is Phase.OUTSIDE
        assert step.version == Version(0, 0)


def test_repr() -> None:
    rig = Rig("ab")
    assert repr(rig["a"]) == "Step(step 0, quorum=none, outside, heal=none)"
    rig.form()
    rig["a"].break_("b is lost")
    assert repr(rig["a"]) == "Step(step 0, quorum=0x200000007.0, broken, heal=none, b is lost)"
    assert Verdict(1, 2, Outcome.VETO).reason == ""


def test_a_drain_is_told_to_the_group_and_acted_on_when_the_group_has_agreed() -> None:
    rig = Rig("ab")
    rig.form()
    rig["a"].departure.drain_wanted = True
    rig.fence()
    assert [rig[n].vote().drain for n in "ab"] == [True, False]
    assert not rig["a"].departure.drain_agreed
    for name in "ab":  # b is another rank of the same group
        rig[name].settle(replace(rig[name].vote(), drain=True))
        assert rig[name].departure.drain_agreed
        assert rig[name].boundary() == Go()
    broken = Rig("ab")
    broken.form()
    broken["a"].departure.drain_wanted = True
    broken["a"].break_("a bucket failed")
    assert not broken["a"].vote().drain
