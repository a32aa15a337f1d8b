"""A job under two lighthouses: what its members are told by either never leads to two quorums beside each other (R22).

In these runs a restart of one lighthouse, however it coincides with freezes and cuts, excuses nothing: the other one
remembers. `both_down` lets both of them be gone at once; then what DESIGN 7 documents of a restart is counted.

The mixes of `moments` strike a lighthouse exactly when a quorum is recorded or announced (`moments.py`).

`FT_SIM_SEEDS` chooses how many seeds a mix gets: 2,000 in scripts/check-long. `python -m tests.simulation --pair` shows
one. What the switches of R22 need where a seed shows it, or a script (tests/protocol/test_succession.py):

| rule | switch | shown by |
|---|---|---|
| a quorum grows out of the last one | Rules.r22_grows | seed 3 |
| a lighthouse that was started again is not informed | Rules.r22_informed | test_succession |
| what both have forgotten is not contradicted | Rules.r22_remembers | test_succession |
| who is away may have had a lease at the other one until both met | Rules.r22_met | seed 1162 of `cuts` |
| a silence ends contact before it is noticed | Rules.r22_silent | seed 3852 of `freezes` |
| who left untrained is not certainly gone | Rules.r22_gone | test_succession |
| whose claims count is the same under either | Rules.r22_proven | seed 2066 of `everything` |
"""

from __future__ import annotations

from typing import Any

import pytest

from ft_core.protocol.lighthouse.rules import Rules
from tests.simulation.config import PAIR_FAULTS, Config
from tests.simulation.test_simulation import CHUNK, SEEDS, START, THOROUGH, story
from tests.simulation.world import simulate

CUTS = ("cut_lighthouse", "cut_peers", "cut_all", "blip", "proxy", "oneway")
STRIKES = ("moment", "moment", "kill_many", "kill")
OFTEN: dict[str, Any] = {"fault_every_s": 0.5}
PLAIN_DATA: dict[str, Any] = {"ranks": 1, "finish_at": 0, "rounds": False}
MIXES: dict[str, dict[str, Any]] = {
    "lighthouses": {"faults": ("lighthouse",)},
    "deaths": {"faults": ("lighthouse", "kill")},
    "cuts": {"faults": ("cut_pair", "cut_one", "kill", "blip")},
    "freezes": {"faults": ("freeze_lighthouse", "cut_one", "kill", "freeze")},
    "everything": {"faults": (*PAIR_FAULTS, *CUTS, "kill", "freeze", "pause", "late", "soft", "leave")},
    "two ranks": {"faults": ("lighthouse", "cut_pair", "cut_one", "kill", "rank_stream", "late_vote"), "ranks": 2},
    "both down": {"faults": ("lighthouse", "kill", "cut_one"), "both_down": 0.5},
    "moments": OFTEN | {"faults": STRIKES},
    "moments and cuts": OFTEN | {"faults": (*STRIKES, "cut_pair", "cut_one", "blip")},
    "moments and freezes": OFTEN | {"faults": (*STRIKES, "freeze", "freeze_lighthouse")},
    "moments, two ranks": OFTEN | {"faults": (*STRIKES, "cut_one", "rank_stream", "late_vote"), "ranks": 2},
    "one after the other": {"faults": ("both_lighthouses", "kill", "cut_one")},
    "drawn": {},
}
PLAIN: dict[str, Any] = {
    "ranks": 1, "finish_at": 0, "rounds": False, "data": False, "fixed_with_spares": False, "settle_s": 0.0,
    "progress_s": 0.25, "min_replicas": 1, "expected": 0, "fault_every_s": 0.5,
}  # fmt: skip


END = START + (SEEDS // 5 if SEEDS >= THOROUGH else max(6, SEEDS // 50))
"""Behind the last seed of each mix."""


def fixed_in(mix: str) -> dict[str, Any]:
    """What is fixed in the runs of a mix."""
    return {"pair": True} | (PLAIN_DATA | MIXES[mix] if MIXES[mix] else {})


@pytest.mark.parametrize("start", range(START, END, CHUNK))
@pytest.mark.parametrize("mix", MIXES)
def test_every_invariant_holds_under_two_lighthouses(mix: str, start: int) -> None:
    commits = served = 0
    seeds = range(start, min(start + CHUNK, END))
    for seed in seeds:
        result = simulate(seed, Config.draw(seed, **fixed_in(mix)))
        if result.violation:
            pytest.fail(story(result), pytrace=False)
        commits += result.world.history.commits
        served += sum(text == "lighthouse %d serves" for _, text, _ in result.world.story)
    assert commits > 20, "hardly anything is committed: it tests nothing"
    assert served > len(seeds), "the other lighthouse never takes over: it tests nothing"


@pytest.mark.parametrize("seed", [150, 413, 425, 543])
def test_what_may_go_on_elsewhere_is_proposed_over_when_nobody_can_train_in_it_any_more(seed: int) -> None:
    """Found by `moments`: the other lighthouse refused what was proposed beside its own quorum, for ever (I7)."""
    result = simulate(seed, Config.draw(seed, **fixed_in("moments")))
    if result.violation:
        pytest.fail(story(result), pytrace=False)


def test_a_quorum_of_one_of_which_the_other_lighthouse_has_told_is_not_overruled_by_an_older_one() -> None:
    """Its only member presents it alone; two members of the older one, which had trained on frozen, presented that."""
    result = simulate(565, Config.draw(565, **fixed_in("everything")))
    if result.violation:
        pytest.fail(story(result), pytrace=False)


@pytest.mark.parametrize("rule", [True, False])
def test_all_state_is_not_called_lost_while_its_holder_comes_over_from_the_other_lighthouse(rule: bool) -> None:
    """The two have just met; the one that goes on serving has not heard of the holder for longer than orphan_s."""
    result = simulate(1162, Config.draw(1162, room_rules=Rules(r22_met=rule), **fixed_in("cuts")))
    told_wrongly = result.violation is not None and "is told that all state is lost" in str(result.violation)
    assert told_wrongly is not rule
    if rule and result.violation:
        pytest.fail(story(result), pytrace=False)


@pytest.mark.parametrize("rule", [True, False])
def test_a_member_of_the_other_lighthouses_last_quorum_is_no_stranger(rule: bool) -> None:
    """It alone held the last commit, was away while the others formed a quorum, and comes to the lighthouse that has
    only been told of the quorum before: its commit was made again."""
    result = simulate(2066, Config.draw(2066, room_rules=Rules(r22_proven=rule), **fixed_in("everything")))
    found = "" if result.violation is None else result.violation.rule
    assert found == ("" if rule else "I6"), result.violation


@pytest.mark.parametrize("rule", [True, False])
@pytest.mark.parametrize(("mix", "seed"), [("freezes", 2065), ("freezes", 3852), ("moments and freezes", 3756)])
def test_all_state_is_not_called_lost_by_a_lighthouse_that_was_frozen(mix: str, seed: int, rule: bool) -> None:
    """The other one serves since; that it no longer stands by was not noticed when the first decision was made."""
    result = simulate(seed, Config.draw(seed, room_rules=Rules(r22_silent=rule), **fixed_in(mix)))
    told_wrongly = result.violation is not None and "is told that all state is lost" in str(result.violation)
    assert told_wrongly is not rule
    if rule and result.violation:
        pytest.fail(story(result), pytrace=False)


@pytest.mark.parametrize(("mix", "seed"), [("cuts", 2087), ("two ranks", 2442)])
def test_a_lease_ends_with_the_lighthouse_that_gave_it(mix: str, seed: int) -> None:
    """It stands by, or is killed, and the holder reaches the serving one no more: 5 s later (orphan_s) its state is
    lost, as documented."""
    result = simulate(seed, Config.draw(seed, **fixed_in(mix)))
    if result.violation:
        pytest.fail(story(result), pytrace=False)


def test_nobody_waits_for_the_quorum_that_only_a_stranger_claims_to_be_in() -> None:
    """It would wait for the stranger as a holder of what was trained, for as long as that has said itself (R18)."""
    result = simulate(42, Config.draw(42, **fixed_in("drawn")))
    if result.violation:
        pytest.fail(story(result), pytrace=False)


def test_without_the_rule_two_quorums_train_beside_each_other() -> None:
    fixed = PLAIN | {"faults": ("cut_pair", "cut_one", "kill"), "pair": True}
    found = simulate(3, Config.draw(3, room_rules=Rules(r22_grows=False), **fixed)).violation
    assert found is not None
    assert found.rule in ("I1", "I3", "I6"), found
    assert simulate(3, Config.draw(3, **fixed)).violation is None
