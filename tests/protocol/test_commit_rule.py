"""`commit_rule.judge` and the ballots it counts: a verdict is a function of the sum alone, the same on all members."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.errors import CollectiveError
from ft_core.protocol.lineage import fold_lineage
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.ballot import (
    CONTRIBUTED,
    COUNT,
    EXHAUSTED,
    FENCE_SLOTS,
    MAX_WEIGHT,
    NO_LEASE,
    TAG,
    TAG_DIGITS,
    WEIGHT,
)
from ft_core.protocol.rank.heal_plan import WorldSizeMode
from ft_core.protocol.rank.phases import Go
from ft_core.protocol.rank.rank import Settled
from ft_core.protocol.types import Outcome, Version
from ft_core.settings import MAX_REPLICAS
from tests.protocol.rig import Rig, new_rank, trained

NAN = on.SoftError(CollectiveError("a NaN"))


@pytest.mark.parametrize("difference", ["version", "lineage", "attempt", "signature", "user_ops"])
def test_the_tag_shows_every_difference(difference: str) -> None:
    rig = Rig()
    rig.form()
    rig.attempt()
    rank = rig["b"]
    if difference == "version":
        rank.attempt.base = rank.held.version = Version(9, rank.held.version.quorum_id)
    elif difference == "lineage":
        rank.attempt.base_lineage = rank.held.lineage = 12345
    elif difference == "attempt":
        rank.attempt.number = 5
    elif difference == "signature":
        rank.describe(5)
    else:
        assert rank.may_launch_user_op()
    assert {v.outcome for v in rig.count().values()} == {Outcome.BROKEN}
    assert "another attempt or holds another state" in rig["a"].broken_reason


def test_a_missing_member_or_a_nan_is_broken_not_committed() -> None:
    rig = Rig()
    rig.form()
    assert rig.count(tamper=[float("nan")] * FENCE_SLOTS)["a"].outcome is Outcome.BROKEN
    rig = Rig()
    rig.form()
    assert rig.count("ab")["a"].outcome is Outcome.BROKEN


def test_as_many_members_as_there_may_be_with_the_largest_weights_sum_exactly_in_float32() -> None:
    def float32(x: float) -> float:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])

    rig = Rig(f"r{i:04}" for i in range(MAX_REPLICAS))
    members_weight = [MAX_WEIGHT if i % 2 else 65535 for i in range(MAX_REPLICAS)]
    rig.form()
    sums = [0.0] * FENCE_SLOTS
    for rank, weight in zip(rig.ranks.values(), members_weight, strict=True):
        rank.weigh(weight)
        assert rank.may_launch(0.0)
        row = rank.ballot(0.0)
        assert all(0 <= x < 1 << 24 and x == int(x) for x in row)
        sums = [float32(a + b) for a, b in zip(sums, row, strict=True)]
    verdict = rig["r0000"].count(sums, 0.0).verdict
    weight = sum(members_weight)
    assert (verdict.outcome, verdict.weight, verdict.contributors) == (Outcome.COMMIT, weight, MAX_REPLICAS)


def test_soft_failure_vetoes_for_all_and_rebuilds_nothing() -> None:
    rig = Rig()
    rig.form()
    assert rig.handle("b", on.SoftError(ValueError("NaN loss"))) == ()
    verdicts = rig.count()
    assert verdicts["b"].reason == "ValueError: NaN loss"
    assert verdicts["a"].reason == "1 of 3 members failed in this step"
    assert [r.settle(verdicts[n]) for n, r in rig.ranks.items()] == [Settled(commit=False, actions=())] * 3
    assert [r.boundary() for r in rig.ranks.values()] == [Go()] * 3
    assert rig.attempt() == dict.fromkeys("abc", True)


def test_autonomy() -> None:
    rig = Rig("ab", autonomy_s=10.0, orphan_s=15.0)
    rig.form()
    rig.now = 11.0
    rig["b"].acknowledged(5.0)
    assert rig.attempt() == {"a": True, "b": True}, "one lease is enough"
    rig.now = 16.0
    stable = rig["a"].held.stable
    verdict = rig.count()["a"]
    assert (verdict.outcome, verdict.reason) == (
        Outcome.VETO, "no member has had a lease for autonomy_s=10 s: waiting for one",
    )  # fmt: skip
    assert rig["a"].held.stable == stable, "nothing is published that the room may have gone on without"
    rig.settle()
    assert [r.attempt.awaits_lease for r in rig.ranks.values()] == [True, True]
    rig.handle("a", on.LeaseReturned())
    assert not rig["a"].attempt.awaits_lease
    rig.fail()
    rig.form()
    assert not rig["b"].attempt.awaits_lease, "in another quorum it is another question"


def test_a_fence_that_took_too_long_without_a_lease_is_broken() -> None:
    rig = Rig("ab", autonomy_s=10.0, orphan_s=15.0)
    rig.form()
    rig.now = 9.0
    sums = rig.sums()
    assert rig["a"].count(sums, 14.1).verdict.outcome is Outcome.BROKEN
    rig["b"].acknowledged(8.0)
    assert rig["b"].count(sums, 14.1).verdict.outcome is Outcome.COMMIT


def test_out_of_data_stops_everybody_also_with_spares_and_a_member_that_cannot_heal() -> None:
    out = on.DataEnded(applies=True, ends=False)
    rig = Rig("ab")
    rig.form()
    rig.handle("a", out)
    verdict = rig.count()["a"]
    assert (verdict.outcome, verdict.weight, verdict.exhausted) == (Outcome.COMMIT, 1, False)
    rig = Rig(mode=WorldSizeMode.FIXED_WITH_SPARES, min_replicas=1)
    rig.form()
    rig.handle("a", out)
    assert rig.count()["c"].exhausted, "spares have data left, but nobody would ever use it"
    rig = trained("ab")
    rig.fail()
    rig.all(out)
    rig.ranks["c"] = new_rank("c")
    rig.form(heal=False)
    rig.handle("c", on.ReceiveFailed(rig["c"].quorum_id, CollectiveError("no donor")))
    assert rig.count()["a"].exhausted


def test_slots_are_what_the_header_says() -> None:
    rig = Rig("ab")
    rig.form()
    rig["a"].weigh(70000)
    row = rig["a"].ballot(0.0)
    assert row[WEIGHT : WEIGHT + 3] == [70000 % 2**14, 70000 // 2**14, 0.0]
    assert (row[COUNT], row[CONTRIBUTED], row[EXHAUSTED], row[NO_LEASE]) == (1.0, 1.0, 0.0, 0.0)
    assert sum(int(row[TAG + i]) << (14 * i) for i in range(TAG_DIGITS)) == rig["a"].attempt.tag()
    rig["a"].weigh(0)
    assert rig["a"].ballot(0.0)[CONTRIBUTED] == 0.0


def test_a_zero_sum_vetoes() -> None:
    rig = Rig("ab")
    rig.form()
    for rank in rig.ranks.values():
        rank.weigh(0)
    assert rig.count()["a"].reason == "no member contributed a gradient"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, MAX_WEIGHT), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=6)
)
def test_every_member_reaches_the_same_verdict(inputs: list[tuple[int, bool, bool, bool]]) -> None:
    rig = Rig("abcdef"[: len(inputs)])
    rig.form()
    events: tuple[on.Event, ...] = (NAN, on.DataEnded(applies=True, ends=False), on.LeaveWanted())
    for name, (weight, *flags) in zip(rig.ranks, inputs, strict=True):
        rig[name].weigh(weight)
        rig.handle(name, *(event for event, flag in zip(events, flags, strict=True) if flag))
    verdicts = rig.count()
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
