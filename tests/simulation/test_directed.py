"""Known situations, played through: pauses against deadlines, a rank that freezes alone, groups that come or do not.

Each is run with the rule that mends it, and with the rule turned off, where it must be seen.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from ft_core.protocol.group.settings import GroupRules
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.rank.settings import RankRules
from tests.simulation.config import Config
from tests.simulation.history import Violation
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = range(8)


def play(seed: int, *script: tuple[float, Callable[[World], object]], **config: Any) -> World:
    """Run a world in which these things happen at these times, and nothing else goes wrong."""
    world = World(seed, Config(**({"safety_s": 30.0, "expected": config.get("groups", 3)} | config)))
    for at, act in script:
        world.at(at, None, lambda act=act: act(world))
    world.run()
    return world


def named(world: World, name: str) -> Any:
    """The living group of that name."""
    return next(group for group in world.active.values() if group.name == name)


def pause(name: str, rank: int, length: float, announced: float) -> Callable[[World], None]:
    """A rank of a group announces to be busy, and is for a while."""

    def act(world: World) -> None:
        one = named(world, name).ranks[rank]
        one.busy_until, one.back_at = world.now + announced, world.now + length
        world.say("%s pauses for %.1f s", one.name, length)
        one.busy()
        world.at(length, one, one._back)

    return act


def kill(name: str) -> Callable[[World], None]:
    """A group dies; nobody starts it again."""
    return lambda world: named(world, name).die("is killed")


def commits(world: World, name: str) -> list[float]:
    """When rank 0 of a group committed."""
    return [
        at for at, text, args in world.story
        if text.startswith("%s commits") and str(args[0]).startswith(f"{name}:") and not str(args[0]).endswith("/1")
    ]  # fmt: skip


def standstill(world: World, name: str, since: float, until: float) -> float:
    """The longest time without a commit of a group, between two instants."""
    times = [since, *(at for at in commits(world, name) if since <= at <= until), until]
    return max(b - a for a, b in itertools.pairwise(times))


def freeze_a_rank(world: World) -> None:
    """For 15 s."""
    rank = named(world, "b").ranks[1]
    rank.stop()
    world.at(15.0, None, rank.resume)


RANKS: dict[str, Any] = {"groups": 2, "ranks": 2, "timeout_s": 12.0, "quorum_s": 60.0}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_frozen_alone_holds_the_others_for_a_liveness_timeout(seed: int) -> None:
    world = play(seed, (5.0, freeze_a_rank), **RANKS)
    assert standstill(world, "a", 5.0, 20.0) < world.config.liveness_s + 0.6
    assert standstill(world, "b", 21.0, 30.0) < 2.0, "it comes back as one"


def freeze_a_rank_for_ever(world: World) -> None:
    named(world, "b").ranks[1].stop()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_whose_ranks_wait_for_a_frozen_one_ends_as_a_whole(seed: int) -> None:
    """Its ranks communicate in their forward pass, so nothing else ends that wait; the group is started again."""
    world = play(seed, (5.0, freeze_a_rank_for_ever), **RANKS, inside=True)
    assert standstill(world, "a", 5.0, 20.0) < world.config.liveness_s + 0.6
    assert standstill(world, "b", 5.0, 30.0) < 2 * world.config.liveness_s + 4.0, "restart and heal included"


def test_without_the_order_it_never_comes_back() -> None:
    off = GroupRules(r12_ends=False)
    worlds = [play(s, (5.0, freeze_a_rank), **RANKS, inside=True, group_rules=off) for s in SEEDS]
    assert min(standstill(world, "b", 5.0, 20.0) for world in worlds) > 13.0, "until the rank is thawed"


def kill_a_rank(world: World) -> None:
    """kill -9 of rank 1 alone: what ends at once are its ring and its stream to its leader."""
    rank = named(world, "b").ranks[1]
    rank.leave_ring()
    rank.link.stream.break_()
    rank.stop()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_dies_alone_costs_the_other_group_no_grace(seed: int) -> None:
    """A second of it here, so that it shows; as long as one member's word is worth something, nobody waits for it."""
    world = play(seed, (5.0, kill_a_rank), **RANKS, inside=True, grace_s=1.0)
    assert standstill(world, "a", 5.0, 10.0) < 0.6
    off = play(seed, (5.0, kill_a_rank), **RANKS, inside=True, grace_s=1.0, group_rules=GroupRules(r12_accused=False))
    assert standstill(off, "a", 5.0, 10.0) > 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_whose_ranks_do_not_wait_for_each_other_waits_for_a_frozen_one(seed: int) -> None:
    world = play(seed, (5.0, freeze_a_rank), **RANKS)
    assert not [text for _, text, args in world.story if "ends:" in text % args]


def test_without_its_leaders_report_it_holds_them_for_the_timeout() -> None:
    """Where the ring of the leaders has its result already, no abort of theirs ends the wait in the other ring."""
    off = Rules(r12_incomplete=False)
    held = [standstill(play(s, (5.0, freeze_a_rank), **RANKS, room_rules=off), "a", 5.0, 20.0) for s in SEEDS]
    assert sum(seconds > 10.0 for seconds in held) >= len(SEEDS) // 2


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_freezes_while_its_groups_ask_is_open(seed: int) -> None:
    """The quorum forms without the group, or is broken at once."""
    freeze = (5.0, lambda world: named(world, "b").ranks[1].stop())
    thaw = (15.0, lambda world: named(world, "b").ranks[1].resume())
    situation: dict[str, Any] = {"groups": 3, "ranks": 2, "timeout_s": 12.0, "quorum_s": 60.0}
    world = play(seed, (4.99, kill("c")), freeze, thaw, **situation)
    assert standstill(world, "a", 5.0, 15.0) < 2 * world.config.liveness_s + 0.6
    assert standstill(world, "b", 16.0, 25.0) < 2.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pause_kills_no_survivor(seed: int) -> None:
    situation: dict[str, Any] = {"groups": 3, "quorum_s": 4.0}
    script = (4.0, pause("c", 0, 12.0, 60.0)), (5.5, kill("b"))
    world = play(seed, *script, **situation)
    assert not [text for _, text, args in world.story if "gives up" in (text % args if args else text)]
    assert standstill(world, "a", 16.0, 30.0) < world.config.join_s + 1.0, "it goes on when the other one is back"
    waits = RankRules(pauses_extend=False, r19_moves=False)  # with R19 the one that is paused asks all the same
    without = play(seed, *script, **situation, member_rules=waits)
    assert "a:1" in [args[0] for *_, args in without.story if len(args) > 1 and "gives up" in str(args[1])]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_vote_waits_for_a_paused_rank(seed: int, rank: int) -> None:
    situation: dict[str, Any] = {"groups": 2, "ranks": 2}
    world = play(seed, (5.0, pause("b", rank, 8.0, 60.0)), **situation)
    assert len(world.history.members) == 1, "the quorum stays"
    with pytest.raises(Violation, match="a vote timed out"):
        play(seed, (5.0, pause("b", rank, 8.0, 60.0)), **situation, group_rules=GroupRules(r12_pauses=False))


@pytest.mark.parametrize("seed", SEEDS)
def test_only_its_liveness_ends_the_wait_for_a_paused_replica(seed: int) -> None:
    def freeze(world: World) -> None:
        named(world, "b").freeze()
        world.at(12.0, None, named(world, "b").thaw)

    world = play(seed, (5.0, pause("b", 0, 8.0, 600.0)), (7.0, freeze), groups=2)
    assert standstill(world, "a", 7.0, 18.0) < world.config.liveness_s + 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_who_is_back_early_and_hangs_is_given_up_after_the_limit(seed: int) -> None:
    """The pause was announced for an hour; the limits count from its end."""

    def hangs(world: World) -> None:
        """Its connections stand, and its training thread does nothing more."""
        one = named(world, "b").ranks[0]
        one.token += 1

    world = play(seed, (5.0, pause("b", 0, 4.0, 3600.0)), (8.9, hangs), groups=2, bad_group=1)
    limit = world.config.timeout_s + world.config.join_s
    assert 4.0 < standstill(world, "a", 5.0, 30.0) < 4.0 + limit + 2.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pause_is_known_to_a_lighthouse_that_restarts_during_it(seed: int) -> None:
    def restart(world: World) -> None:
        world.stop_lighthouse()
        world.at(1.0, None, world.start_lighthouse)

    world = play(seed, (5.0, pause("b", 0, 12.0, 60.0)), (6.0, restart), groups=2)
    assert len(world.history.members) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cold_start_with_a_group_missing_waits_for_no_state_that_nobody_has_shown(seed: int) -> None:
    situation: dict[str, Any] = {"groups": 3, "orphan_s": 20.0, "quorum_s": 40.0, "supervised": False}
    never = (0.0, kill("c"))
    world = play(seed, never, **situation)
    assert commits(world, "a")[0] < world.config.boot_window_s + world.config.join_s + 2.0
    without = play(seed, never, **situation, room_rules=Rules(r9_only_trained=False))
    assert commits(without, "a")[0] > 19.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_newcomer_that_wants_more_groups_stops_nobody(seed: int) -> None:
    situation: dict[str, Any] = {"groups": 3, "choosy": (2, 4), "bad_group": 2, "expected": 0}
    comes = (0.0, kill("c")), (5.0, lambda world: world.spawn(2))
    world = play(seed, *comes, **situation)
    assert standstill(world, "a", 3.0, 30.0) < 1.5
    without = play(seed, *comes, **situation, room_rules=Rules(min_by_majority=False))
    assert standstill(without, "a", 3.0, 30.0) > 5.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_death_during_forward_costs_no_attempt(seed: int) -> None:
    """R19. The forward pass takes 1 to 3 s, so all are in it; without the rule it is made again."""
    situation: dict[str, Any] = {"groups": 3, "forward_s": 2.0, "liveness_s": 0.2}
    world = play(seed, (9.0, kill("c")), **situation)
    without = play(seed, (9.0, kill("c")), **situation, member_rules=RankRules(r19_moves=False))
    before, after = (max(at for at in commits(w, "a") if at < 9.0) for w in (world, without))
    assert before == after, "the runs are the same until the kill"
    gap, longer = (min(at for at in commits(w, "a") if at > 9.0) - before for w in (world, without))
    if world.history.moved == 2:  # else somebody had launched already
        assert gap < 3.2
        assert longer > gap + 0.5


@pytest.mark.parametrize("ranks", [1, 2])
def test_attempts_move_in_most_runs_in_which_somebody_dies(ranks: int) -> None:
    situation: dict[str, Any] = {"groups": 3, "ranks": ranks, "forward_s": 2.0, "liveness_s": 0.2}
    assert sum(play(seed, (9.0, kill("c")), **situation).history.moved for seed in SEEDS) >= len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_dies_alone_during_forward_costs_the_other_group_no_attempt(seed: int) -> None:
    situation: dict[str, Any] = {"groups": 2, "ranks": 2, "forward_s": 2.0, "liveness_s": 0.2, "inside": True}
    world = play(seed, (9.0, kill_a_rank), **situation)
    without = play(seed, (9.0, kill_a_rank), **situation, member_rules=RankRules(r19_groups=False))
    before, after = (max(at for at in commits(w, "a") if at < 9.0) for w in (world, without))
    assert before == after, "the runs are the same until the kill"
    gap, longer = (min(at for at in commits(w, "a") if at > 9.0) - before for w in (world, without))
    if world.history.moved == 2:  # else a rank had launched already
        assert gap < 3.2
        assert longer > gap + 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_whose_leader_freezes_while_others_wait_for_a_quorum_ends_as_a_whole(seed: int) -> None:
    """R12. Its other rank waits for its vote, is broken, and asks: nobody answers. The frozen one would not end it."""

    def freezes(world: World) -> None:
        named(world, "b").freeze(leader_only=True)

    world = play(seed, (5.0, freezes), **RANKS)
    assert [one for _, one, args in world.story if "cannot be had without it" in one % args], "it had asked"
    assert standstill(world, "a", 5.0, 20.0) < world.config.liveness_s + 0.6
    assert standstill(world, "b", 5.0, 30.0) < 2 * world.config.liveness_s + 4.0, "restart and heal included"
    without = play(seed, (5.0, freezes), **RANKS, group_rules=GroupRules(r12_silent=False))
    assert standstill(without, "b", 5.0, 30.0) > 20.0


@pytest.mark.parametrize("seed", SEEDS)
def test_an_attempt_does_not_move_where_somebody_needs_state(seed: int) -> None:
    """A group that comes just when another dies is let in at the next boundary, and all commit together."""
    situation: dict[str, Any] = {"groups": 3, "forward_s": 2.0, "liveness_s": 0.2}
    world = play(seed, (9.0, kill("c")), (9.0, lambda world: world.spawn(2)), **situation)
    assert commits(world, "c")[-1] > 9.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_lost_everything_begins_again_only_if_it_shall(seed: int) -> None:
    """R21. All are killed at once and started again; who is refused is then started with FT_FROM_SCRATCH."""
    situation: dict[str, Any] = {"groups": 3, "supervised": True}

    def all_die(world: World) -> None:
        for name in "a", "b", "c":
            kill(name)(world)

    def again(world: World) -> None:
        for number in range(3):
            world.spawn(number)

    script = (6.0, all_die), (7.5, again)
    refused = "all state is lost", "everybody who held them is gone"
    told = {
        rule: [at for at, text, args in play(seed, *script, **situation, room_rules=Rules(r21_not_again=rule)).story
               if any(word in (text % args if args else text) for word in refused)]
        for rule in (True, False)
    }  # fmt: skip
    assert len(told[True]) >= 3
    assert not told[False]
    world = play(seed, *script, **situation)
    assert world.from_scratch
    assert [at for at in commits(world, "a") if at > told[True][0]], "it does when it is told to"


@pytest.mark.parametrize("settle_s", [0.0, 0.03])
def test_newcomers_that_arrive_within_a_step_join_together(settle_s: float) -> None:
    """Three come within one step of the others, one of them with more to copy: one new quorum, else often two."""

    def quorums(seed: int, rules: Rules) -> int:
        def comes(world: World) -> None:
            for number in (2, 3, 4):
                world.at(0.3 * (number - 2), None, world.restart, number)

        gone = [(0.0, kill(name)) for name in "cde"]
        situation: dict[str, Any] = {"groups": 5, "expected": 2, "forward_s": 0.4, "copy_s": 0.6, "safety_s": 14.0}
        world = play(seed, *gone, (8.0, comes), **situation, settle_s=settle_s, room_rules=rules)
        assert commits(world, "e")
        notes = [(at, str(args[0])) for at, text, args in world.story if text == "lighthouse: %s"]
        return sum(at > 8.0 and note.startswith("quorum of") for at, note in notes)

    together = [quorums(seed, Rules()) for seed in SEEDS]
    apart = [quorums(seed, Rules(together=False)) for seed in SEEDS]
    assert sum(together) < sum(apart), (together, apart)
