"""R12 at the boundary: the ranks of a group go on, or ask, together, whatever one of them heard since the vote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ft_core.protocol.rank.phases import Go, MustAsk, Phase
from ft_core.protocol.rank.settings import MemberRules
from ft_core.protocol.types import Outcome
from tests.protocol.rig import Rig

if TYPE_CHECKING:
    from ft_core.protocol.rank.rank import Step


def ranks(rules: MemberRules | None = None) -> Step:
    """A rank of a group of two, after a committed step."""
    rig = Rig(group_world_size=2, rules=rules or MemberRules())
    rig.form()
    rig.attempt()
    return rig["a"]


def test_what_broke_since_the_vote_is_told_in_the_next_one() -> None:
    step = ranks()
    assert step.plan is not None
    step.lost(step.plan.quorum_id, "b is gone")
    assert step.phase is Phase.BROKEN
    assert isinstance(step.boundary(), Go)
    assert isinstance(step.boundary(), Go)  # asked again before anything was launched
    assert not step.launching(0.0)
    verdict = step.vote()
    assert (verdict.outcome, verdict.reason) == (Outcome.BROKEN, "b is gone")
    step.settle(verdict)
    assert isinstance(step.boundary(), MustAsk)


def fenced() -> Step:
    rig = Rig(group_world_size=2)
    rig.form()
    assert {v.outcome for v in rig.fence().values()} == {Outcome.COMMIT}
    return rig["a"]


def test_a_loss_heard_before_the_vote_is_told_in_it() -> None:
    step = fenced()
    assert step.plan is not None
    step.lost(step.plan.quorum_id, "b is gone")
    told = step.vote()
    assert (told.outcome, told.change) == (Outcome.COMMIT, True)
    assert step.settle(told)
    assert isinstance(step.boundary(), MustAsk)


def test_a_loss_heard_between_vote_and_answer_waits_for_the_next_vote() -> None:
    step = fenced()
    assert step.plan is not None
    told = step.vote()
    assert not told.change
    step.lost(step.plan.quorum_id, "b is gone")
    assert step.settle(told)  # as the others of the group do, who have not heard of it
    assert isinstance(step.boundary(), Go)
    assert not step.launching(0.0)
    verdict = step.vote()
    assert (verdict.outcome, verdict.reason) == (Outcome.BROKEN, "b is gone")


def test_a_vote_that_was_skipped_ends_the_agreement() -> None:
    step = ranks()
    step.launching(0.0)
    step.break_("its collective failed")
    assert isinstance(step.boundary(), MustAsk)


@pytest.mark.parametrize("rules", [MemberRules(r12_alike=False)])
def test_without_the_rule_one_rank_asks_alone(rules: MemberRules) -> None:
    step = ranks(rules)
    assert step.plan is not None
    step.lost(step.plan.quorum_id, "b is gone")
    assert isinstance(step.boundary(), MustAsk)


def test_a_group_of_one_asks_at_once() -> None:
    rig = Rig()
    rig.form()
    rig.attempt()
    step = rig["a"]
    assert step.plan is not None
    step.lost(step.plan.quorum_id, "b is gone")
    assert isinstance(step.boundary(), MustAsk)
