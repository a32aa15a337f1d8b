"""Every reason that a veto can have, as it is really composed, belongs to its cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ft_core.events.schema import VETO_CAUSES
from ft_core.protocol.group.merge import merge_votes
from ft_core.protocol.rank.ballot import FenceSum, pieces_of
from ft_core.protocol.rank.commit_rule import Facts, judge
from ft_core.protocol.types import Outcome, Verdict
from ft_core.runtime.parity_check import DIFFERS
from ft_core.runtime.veto_cause import BATCH_WEIGHTS, DIFFERENT, ELSEWHERE, ERROR, MISSING, cause_of_veto
from tests.protocol.rig import Rig


def judged(soft_error: str = "", whole_steps: bool = False, **told: Any) -> Verdict:
    """The verdict of one of three members on a sum in which all contributed, but for what is given."""
    rig = Rig("abc")
    rig.form()
    rank = rig["a"]
    assert rank.plan is not None
    n, tag = 3, 77
    usual = FenceSum(n, [n * piece for piece in pieces_of(tag)], 3, 3, 0b111, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, False)
    facts = Facts(rank.plan, 0, tag, (0, 1, 2), soft_error, False, 0.0, False, False, False, False, whole_steps)
    return judge(replace(usual, **told), facts, rank.settings).verdict


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        ({"failed": 1, "soft_error": "ValueError: a NaN"}, "error"),
        ({"failed": 1}, "error of another member"),
        ({"weight": 0, "out": 3}, "out of data"),
        ({"weight": 0}, "no gradient"),
        ({"trailing": 1, "stop": 1}, "stop"),
        ({"shares": 0b101, "whole_steps": True}, "share missing"),
        ({"no_lease": 3}, "no lease"),
    ],
)
def test_what_a_ring_decides(told: dict[str, Any], cause: str) -> None:
    verdict = judged(**told)
    assert verdict.outcome is Outcome.VETO
    assert cause_of_veto(verdict.reason) == cause


def test_what_a_group_decides() -> None:
    commit = judged()
    assert commit.outcome is Outcome.COMMIT
    for votes, cause in (
        ({0: commit, 1: replace(commit, missing=(1,))}, MISSING),
        ({0: replace(commit, own_weight=1), 1: replace(commit, own_weight=2)}, BATCH_WEIGHTS),
        ({0: replace(commit, own_weight=1), 1: replace(commit, own_weight=1, weight=9)}, BATCH_WEIGHTS),
        ({0: commit, 1: judged(failed=2)}, ELSEWHERE),
    ):
        merged = merge_votes(votes, 2)
        assert merged is not None
        assert merged.outcome is Outcome.VETO
        assert cause_of_veto(merged.reason) == cause


def test_differing_states_and_errors_with_any_text() -> None:
    assert cause_of_veto(f"the state of a, b {DIFFERS}") == DIFFERENT
    for text in ("", "ValueError: every member is out of data", "RuntimeError: CUDA out of memory"):
        assert cause_of_veto(text) == ERROR


def test_every_cause_has_a_test() -> None:
    assert len(VETO_CAUSES) == 9
