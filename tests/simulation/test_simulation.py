"""Thousands of seeded runs of the whole protocol, and each rule of DESIGN 3.9 shown to be necessary.

`FT_SIM_SEEDS` (default 100; scripts/check-long draws 10,000) and `FT_SIM_START` (default 0) choose the seeds. A
failure prints how to see it again:
`python -m tests.simulation --seed N --trace`.

Which rule is shown necessary where (seeds needed until the first violation when it is turned off):

| rule | switch | needs | violates |
|---|---|---|---|
| R0 verdict, tag | RankRules.r0_verdict + r0_tag | 1 | I1 two states under one version, I4 or I10 gradients of both |
| R1 no quorum beside a living one | Rules.r1_ended | 52 | I3 two quorums commit side by side |
| R1 a closed connection is no death | Rules.r1_closed | 18 | I3 two quorums commit side by side |
| R2 no amnesia | Rules.r2_no_amnesia | 16 | I3 a published step is made again |
| R2 who was healed reports what is stable, too | RankRules.r2_healed | 38 | I3 a published step is made again |
| R3 autonomy | RankRules.r3_autonomy | 209 | I3 two quorums commit side by side |
| R3 waiting | RankRules.r3_waits | 1 | I7 one attempt after another is lost while no member has a lease |
| R4 aligned collectives | RankRules.r4_aligned | 1 | I4 collectives of two attempts are paired |
| R4 the script's own collectives | RankRules.r4_user_ops | 1 | I4 one is paired with another one of a peer's |
| R7 void while receiving | RankRules.r7_void | 1 | I1 training goes on from a torn state |
| R8 ids | QuorumIds.unique | 39 | I2 ids go back after a restart |
| R9 boot window | Rules.r9_boot | 3 | I3 a published step is made again after a restart |
| R10 divisor | RankRules.r10_divisor | 1 | I5 the divisor is not the number of gradients |
| R11 no veto by a healing member | RankRules.r11_no_veto | 16 | I7 a member that cannot heal stops the others |
| R12 votes wait for paused ranks | GroupRules.r12_pauses | 1 | I7 a group breaks its quorum, a rank of it paused |
| R12 a vote that waited too long is taken back | GroupRules.r12_withdraws | 3 | R12 a rank commits, another does not |
| R12 verdicts are told again before breaks | GroupRules.r12_verdict_first | 28 | R12 a rank commits, another does not |
| R12 what a rank has missed is told again | GroupRules.r12_retold | 95 | R12 a rank commits, another does not |
| R12 an ask that lost a rank is made anew | GroupRules.r12_void_ask | 17 | I3 two quorums commit side by side |
| R12 ranks go on in mid-step together | GroupRules.r12_moves | 1 | R12 ranks commit different steps of the script |
| a pause extends limits | RankRules.pauses_extend | 66 | I7 a survivor gives up while a peer is paused |
| pauses are told to new quorums | Rules.pauses_told | 6 | I7 a collective times out, a member paused |
| R14 answers are repeated only in force | Rules.r14_in_force | 44 | I3 two quorums commit side by side |
| R16 parting | RankRules.r16_parting | 1 | I3 a step is made again that a replica shut down with |
| two replicas that cannot reach each other | Rules.leave_out_unreachable | 2 | I7 nobody commits |
| R18 claims | Rules.r18_claims | 1 | I7 a stranger ends the job |
| R17 shares | RankRules.r17_shares | 1 | I8 samples of a replica that could not be healed are lost |
| R19 positions | RankRules.r19_positions | 2 | I10 an open step goes on among others that are a batch further |

One group that is set up wrongly (and the rules that keep it from stopping the others): test_set_up_wrongly.py. State on
its way, with R19's rule that an attempt which moves gives way to a newcomer, and how long a newcomer waits for live
state that nobody gives (RankRules.given_within): test_receiving.py. Every message travels encoded, so that a bound that
is broken fails (I9).

R6, R10 (ready), R13 and R15 change what is lost or how long something takes, not what is true, so they
have directed tests: tests/protocol/test_rules.py.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.protocol.group.settings import GroupRules
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.rank.settings import RankRules
from tests.simulation.config import Config
from tests.simulation.world import Result, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = int(os.environ.get("FT_SIM_SEEDS", "100"))
START = int(os.environ.get("FT_SIM_START", "0"))
CHUNK = 50
THOROUGH = 5000
"""With so many seeds (scripts/check-long) the other runs are as many as they were when the rules were made."""


def some(seeds: int) -> range:
    """So many seeds in a thorough run, a quarter of them else."""
    return range(seeds if SEEDS >= THOROUGH else seeds // 4)


def story(result: Result) -> str:
    """What to print about a failed seed."""
    config = result.world.config
    return (
        f"seed {result.seed}: {result.violation}\n{config}\n{result.world.transcript(60)}\n"
        f"again: python -m tests.simulation --seed {result.seed} --trace"
    )


@pytest.mark.parametrize("start", range(START, START + SEEDS, CHUNK))
def test_every_invariant_holds(start: int, record_property: Callable[[str, object], None]) -> None:
    remainder, commits = Counter[str](), 0
    for seed in range(start, min(start + CHUNK, START + SEEDS)):
        result = simulate(seed)
        if result.violation:
            pytest.fail(story(result), pytrace=False)
        remainder.update(result.world.history.remainder)
        commits += result.world.history.commits
    assert commits > CHUNK, "the simulation hardly commits anything: it tests nothing"
    for what, count in sorted(remainder.items()):
        record_property(what, count)
        print(f"documented remainder, seeds {start}..: {what}: {count} of {commits} commits")


PLAIN: dict[str, Any] = {
    "ranks": 1, "fixed_with_spares": False, "finish_at": 0, "fault_every_s": 0.5, "min_replicas": 1, "expected": 0,
    "rounds": False, "data": False, "settle_s": 0.0, "progress_s": 0.25,
}  # fmt: skip
LOST_STREAMS: dict[str, Any] = {"ranks": 2, "faults": ("rank_stream", "late"), "fault_every_s": 0.05}
"""Ranks lose what is under way between them and their leader, again and again."""
NECESSARY: dict[str, tuple[int, str, dict[str, Any]]] = {
    "R0": (20, "I1/I4/I10", {"faults": ("late",), "member_rules": RankRules(r0_verdict=False, r0_tag=False)}),
    "R1": (
        60, "I3",
        {"groups": 2, "faults": ("freeze", "duplicate", "kill", "cut_lighthouse"), "room_rules": Rules(r1_ended=False)},
    ),
    "R1 closed": (
        60, "I3", {"groups": 2, "faults": ("proxy", "kill", "oneway"), "room_rules": Rules(r1_closed=False)},
    ),
    "R2": (
        60, "I3",
        {"faults": ("freeze", "duplicate", "kill"), "room_rules": Rules(r2_no_amnesia=False, r21_not_again=False)},
    ),
    "R3": (
        400, "I3",
        {
            "groups": 2, "faults": ("cut_lighthouse", "duplicate", "kill"),
            "member_rules": RankRules(r3_autonomy=False),
        },
    ),
    "R3, waiting": (
        60, "I7", {"groups": 2, "faults": ("lighthouse",), "member_rules": RankRules(r3_waits=False)},
    ),
    "R4": (60, "I4", {"faults": ("skip",), "member_rules": RankRules(r4_aligned=False)}),
    "R4 own collectives": (
        60, "I4",
        {
            "faults": ("skip_op",), "user_ops": 1, "waits_for_ops": False, "op_after": False,
            "member_rules": RankRules(r4_user_ops=False),
        },
    ),
    "R7": (
        60, "I1",
        {
            "groups": 4, "faults": ("heal", "kill"), "heals_before_forward": True,
            "member_rules": RankRules(r7_void=False),
        },
    ),
    "R8": (60, "I2", {"faults": ("lighthouse",), "unique_ids": False}),
    "R9": (
        60, "I3", {"groups": 3, "faults": ("lighthouse", "kill"), "room_rules": Rules(r9_boot=False)},
    ),
    "R10": (60, "I5", {"faults": ("heal", "kill"), "member_rules": RankRules(r10_divisor=False)}),
    "R11": (60, "I7", {"faults": ("kill",), "bad_group": 0, "member_rules": RankRules(r11_no_veto=False)}),
    "R16": (20, "I3", {"faults": ("shutdown",), "member_rules": RankRules(r16_parting=False)}),
    "links": (
        30, "I7",
        {
            "groups": 3, "faults": ("kill",), "cut_forever": (0, 1),
            "room_rules": Rules(leave_out_unreachable=False, r21_not_again=False),
        },
    ),
    "R17": (
        60, "I8",
        {
            "groups": 4, "faults": ("heal", "kill"), "heals_before_forward": True, "data": True,
            "member_rules": RankRules(r17_shares=False),
        },
    ),
    "R2 healed": (
        400, "I3",
        {
            "groups": 2, "faults": ("freeze", "duplicate", "kill", "cut_lighthouse"),
            "member_rules": RankRules(r2_healed=False),
        },
    ),
    "R12 pauses": (
        60, "I7", {"ranks": 2, "faults": ("pause",), "group_rules": GroupRules(r12_pauses=False)},
    ),
    "R12 withdraws": (
        60, "R12",
        {"ranks": 2, "faults": ("late_vote",), "fault_every_s": 0.3, "group_rules": GroupRules(r12_withdraws=False)},
    ),
    "R12 verdict first": (200, "R12", {**LOST_STREAMS, "group_rules": GroupRules(r12_verdict_first=False)}),
    "R12 retold": (
        200, "R12/I3",
        {
            **LOST_STREAMS, "groups": 2, "faults": ("rank_stream", "soft", "late"),
            "group_rules": GroupRules(r12_retold=False),
        },
    ),
    "R12 void ask": (
        200, "I3",
        {
            "ranks": 2, "faults": ("cut_lighthouse", "freeze_rank"), "fault_every_s": 0.3,
            "group_rules": GroupRules(r12_void_ask=False),
        },
    ),
    "R12 moves": (
        100, "R12",
        {"ranks": 2, "faults": ("kill", "configure"), "fault_every_s": 0.3, "group_rules": GroupRules(r12_moves=False)},
    ),
    "pauses extend": (
        200, "I7", {"groups": 3, "faults": ("pause", "skip"), "member_rules": RankRules(pauses_extend=False)},
    ),
    "pauses told": (
        100, "I7", {"groups": 3, "faults": ("pause", "skip"), "room_rules": Rules(pauses_told=False)},
    ),
    "R18": (20, "I7", {"faults": ("stranger", "kill"), "room_rules": Rules(r18_claims=False)}),
    "R19 positions": (
        60, "I10",
        {
            "groups": 3, "faults": ("kill", "late"), "drops_batches": True,
            "member_rules": RankRules(r19_positions=False),
        },
    ),
    "R14": (
        60, "I3",
        {
            "groups": 3, "faults": ("cut_all", "cut_lighthouse"), "fault_every_s": 0.25,
            "room_rules": Rules(r14_in_force=False, r21_not_again=False),
        },
    ),
}  # fmt: skip
"""rule -> (seeds within which it must be found, the invariant that breaks, how to look for it)."""
FOUND = {
    "R1": 51, "R2": 15, "R3": 208, "R8": 38, "R11": 22, "R2 healed": 37, "R12 verdict first": 63, "R12 retold": 94,
    "R12 void ask": 17, "R14": 43,
}  # fmt: skip
"""Seeds that show it, where there are many before: the search begins there, and goes through all if that fails."""


@pytest.mark.parametrize("rule", NECESSARY)
def test_without_the_rule_the_simulation_finds_the_failure(rule: str) -> None:
    limit, invariant, fixed = NECESSARY[rule]
    for seed in sorted(range(limit), key=lambda seed: SEEDS < THOROUGH and seed != FOUND.get(rule)):
        violation = simulate(seed, Config.draw(seed, **{**PLAIN, **fixed})).violation
        if violation:
            print(f"without {rule}: seed {seed}: {violation}")
            assert violation.rule in invariant.split("/"), violation
            return
    pytest.fail(f"{limit} seeds without {rule} and no violation: is the rule necessary, or the simulation blind?")


@pytest.mark.parametrize("rule", NECESSARY)
def test_with_the_rule_the_same_runs_are_clean(rule: str) -> None:
    """The one that shows it without the rule, and the first few."""
    limit, _, fixed = NECESSARY[rule]
    limit = min(limit, 60 if SEEDS >= THOROUGH else 3)
    off = {"member_rules", "group_rules", "room_rules", "unique_ids"}
    for seed in {*range(limit), FOUND.get(rule, 0)}:
        result = simulate(seed, Config.draw(seed, **{**PLAIN, **{k: v for k, v in fixed.items() if k not in off}}))
        if result.violation:
            pytest.fail(story(result), pytrace=False)


@pytest.mark.parametrize("ends_rounds", [False, True])
def test_rounds_of_data_end_together(ends_rounds: bool) -> None:
    ended = 0
    for seed in some(150):
        result = simulate(seed, Config.draw(seed, rounds=True, finish_at=0, ends_rounds=ends_rounds))
        if result.violation:
            pytest.fail(story(result), pytrace=False)
        ended += result.world.history.ended
    assert ended > len(some(150))


@pytest.mark.parametrize("late_rank", [False, True])
def test_groups_of_two_ranks_lose_their_streams_and_vote_late(late_rank: bool) -> None:
    faults = ("rank_stream", "late_vote", "freeze_rank", "pause", "kill")
    for seed in some(100):
        result = simulate(seed, Config.draw(seed, ranks=2, faults=faults, late_rank=late_rank))
        if result.violation:
            pytest.fail(story(result), pytrace=False)


def test_leaders_freeze_while_their_ranks_run() -> None:
    ended = 0
    for seed in some(60):
        faults = ("freeze_leader", "rank_stream", "kill", "pause", "late_vote")
        result = simulate(seed, Config.draw(seed, ranks=2, faults=faults))
        if result.violation:
            pytest.fail(story(result), pytrace=False)
        ended += "which cannot be had without it" in result.world.transcript()
    assert ended > 3, "no group had to end"


@pytest.mark.parametrize("seed", [1642, 2138, 3453])
def test_newcomers_of_two_ranks_do_not_wait_for_state_that_nobody_gives(seed: int) -> None:
    """Found by `--ranks 2`: a donor that is paused, frozen or cut off, and others that wait for a quorum meanwhile."""
    result = simulate(seed, Config.draw(seed, ranks=2))
    if result.violation:
        pytest.fail(story(result), pytrace=False)


def test_a_run_is_a_function_of_its_seed() -> None:
    first, second = simulate(11).world, simulate(11).world
    assert first.transcript() == second.transcript()
    assert first.events == second.events


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bad_rank", [-1, 1])
def test_a_member_that_never_heals_does_not_hold_the_others(ranks: int, bad_rank: int) -> None:
    for seed in some(60):
        fixed = {"bad_group": 0, "bad_rank": bad_rank, "ranks": ranks}
        result = simulate(seed, Config.draw(seed, heals_before_forward=seed % 2 == 0, **fixed))
        if result.violation:
            pytest.fail(story(result), pytrace=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_sample_is_lost_or_comes_twice_when_heals_of_participants_fail(ranks: int) -> None:
    """As many runs as it takes for some samples to come back, too."""
    returned = 0
    for seed in range(200):
        if seed >= len(some(200)) and returned > 5:
            break
        fixed = {"rounds": False, "finish_at": 0, "ranks": ranks, "fault_every_s": 0.5}
        result = simulate(seed, Config.draw(seed, heals_before_forward=True, faults=("heal", "kill", "late"), **fixed))
        if result.violation:
            pytest.fail(story(result), pytrace=False)
        returned += result.world.history.returned
    assert returned > 5
