"""One group that is set up wrongly: the others train on, with each of the rules that see to it; without it they do not.

The group comes when the others train, or with them: with a larger min_replica_size, with another world_size_mode, with
a process group that it can never build, or as one more than a quorum holds.
"""

from __future__ import annotations

from typing import Any

import pytest

from ft_core.protocol.lighthouse.rules import Rules
from ft_core.rpc.codec import state
from tests.simulation.config import Config
from tests.simulation.test_simulation import PLAIN, story
from tests.simulation.world import Result, simulate

SEEDS = 12
SEEDS_WITHOUT = 2
FAULTY: dict[str, dict[str, Any]] = {
    "min": {"groups": 4, "odd_group": 3, "odd": "min", "faults": (), "quorum_s": 200.0},
    "min, kills": {"groups": 4, "odd_group": 3, "odd": "min", "faults": ("kill", "freeze")},
    "mode": {"groups": 3, "odd_group": 2, "odd": "mode", "faults": ()},
    "mode, lighthouse": {"groups": 3, "odd_group": 0, "odd": "mode", "faults": ("lighthouse",)},
    "unbuilt": {"groups": 3, "unbuilt_group": 2, "faults": ()},
    "unbuilt, first": {"groups": 3, "unbuilt_group": 0, "faults": ()},
    "unbuilt, unsure": {"groups": 3, "unbuilt_group": 2, "unbuilt_late": False, "unbuilt_knows": False, "faults": ()},
    "unbuilt, faults": {"groups": 4, "unbuilt_group": 1, "faults": ("kill", "lighthouse", "late")},
}  # fmt: skip
WITHOUT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "the usual min_replica_size counts": ("min", "I7", {"room_rules": Rules(min_by_majority=False)}),
    "settings are compared": ("mode", "I5", {"compared": False}),
    "members come first": ("mode, lighthouse", "I7", {"room_rules": Rules(r4_members=False)}),
}  # fmt: skip
"""rule -> (where it is seen, the invariant that breaks without it, how to turn it off)."""


def runs(case: str, seeds: int = SEEDS, **more: Any) -> list[Result]:
    fixed = {**PLAIN, "ranks": 1, "min_replicas": 2, "supervised": True, **FAULTY[case], **more}
    return [simulate(seed, Config.draw(seed, **fixed)) for seed in range(seeds)]


@pytest.mark.parametrize("case", FAULTY)
def test_the_others_train_on(case: str) -> None:
    for result in runs(case):
        if result.violation:
            pytest.fail(story(result), pytrace=False)


@pytest.mark.parametrize("rule", WITHOUT)
def test_without_the_rule_they_do_not(rule: str) -> None:
    case, invariant, off = WITHOUT[rule]
    found = [result.violation for result in runs(case, SEEDS_WITHOUT, **off) if result.violation]
    assert found, f"{SEEDS_WITHOUT} seeds without the rule that {rule}: is it necessary, or the simulation blind?"
    assert all(violation.rule.startswith(invariant) for violation in found), found


def test_who_cannot_build_is_held_back() -> None:
    """Without the rule every second of the others is an attempt to build with it: they make a third of their steps."""

    def steps(**off: Any) -> int:
        return sum(result.world.history.commits for result in runs("unbuilt", SEEDS_WITHOUT, **off))

    assert steps(room_rules=Rules(r15_unbuilt=False)) < steps() / 3


@pytest.mark.parametrize("held", [True, False])
def test_a_quorum_of_more_groups_than_can_be_told_to_each_other(monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """As if a message held three groups."""
    monkeypatch.setattr(state, "MAX_REPLICAS", 3)
    monkeypatch.setattr("ft_core.protocol.lighthouse.candidates.MAX_REPLICAS", 3)
    config = {**PLAIN, "groups": 4, "faults": (), "room_rules": Rules(places=held), "bad_group": 3, "places": 3}
    found = [simulate(seed, Config.draw(seed, **config)).violation for seed in range(5)]
    if held:
        assert found == [None] * 5
    else:
        assert all(violation is not None and violation.rule == "I9" for violation in found)
