"""State on its way, played through: donors that are full, slow or cannot encode, and newcomers that copy live state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ft_core.protocol.rank.settings import RankRules
from tests.simulation.history import Violation
from tests.simulation.test_directed import SEEDS, kill, named, pause, play, standstill

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import World


def again(number: int) -> Callable[[World], None]:
    """Its scheduler starts a group again."""
    return lambda world: world.restart(number)


def set_all(**values: Any) -> Callable[[World], None]:
    """Fields of all groups that are there."""

    def act(world: World) -> None:
        for group in world.active.values():
            for name, value in values.items():
                setattr(group, name, value)

    return act


def unsendable(value: bool) -> Callable[[World], None]:
    """Whether the state of all groups holds what cannot be encoded."""
    return set_all(unsendable=value)


def heals(world: World, name: str) -> list[float]:
    """When a group was healed."""
    return [at for at, text, args in world.story if "is healed" in text and str(args[0]).startswith(f"{name}:")]


def said(world: World, what: str) -> list[str]:
    """Lines of the story."""
    lines = [text % args if args else text for _, text, args in world.story]
    return [line for line in lines if what in line]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_of_live_state_may_take_longer_than_a_quorum(seed: int) -> None:
    """quorum_timeout is for what the lighthouse does; copying has a limit of its own."""
    world = play(seed, (4.0, kill("b")), (4.2, again(1)), copy_s=24.0, quorum_s=9.0, safety_s=40.0, prefetch_s=60.0)
    assert said(world, "has copied live state")
    assert not said(world, "gives up")
    assert standstill(world, "a", 5.0, 40.0) < 2.0, "nobody waits for the copy"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_newcomer_does_not_wait_for_live_state_longer_than_others_wait_for_it(seed: int) -> None:
    """Its rank 1 is given state and asks; that of its rank 0 is held by a rank that is paused for long."""
    script = (4.0, pause("a", 0, 14.0, 21.0)), (4.3, kill("b")), (4.4, again(1))
    two: dict[str, Any] = {"groups": 2, "ranks": 2, "safety_s": 40.0}
    world = play(seed, *script, **two)
    assert len(said(world, "has copied live state")) == 1, "rank 0 has copied nothing"
    assert len(heals(world, "b")) >= 2
    assert not said(world, "gives up")
    with pytest.raises(Violation, match="b:2/1 gives up: no quorum within 9 s"):
        play(seed, *script, **two, member_rules=RankRules(given_within=False))


def a_death_beside_a_newcomer(world: World) -> None:
    """A third group wants live state while the two others compute, of which one dies then."""

    def act() -> None:
        survivor = named(world, "a").ranks[0]
        if world.now - survivor.machine.attempt.opened_at < 0.005 and not world.living(2):
            world.restart(2)  # it comes within half a second, and forward takes one at least
        if survivor.receiving.awaited:
            kill("b")(world)
        else:
            world.at(0.001, None, act)

    act()


BOTH: dict[str, Any] = {
    "groups": 3, "absent": 2, "expected": 2, "min_replicas": 2, "forward_s": 2.0, "orphan_s": 90.0, "timeout_s": 30.0,
    "autonomy_s": 60.0, "copy_s": 0.01, "prefetch_s": 40.0,
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_an_attempt_that_moves_is_given_up_for_a_newcomer_that_wants_state(seed: int) -> None:
    """Else the newcomer waits for state before it asks, and the survivor for its ask."""
    world = play(seed, (4.0, a_death_beside_a_newcomer), **BOTH)
    assert standstill(world, "a", 4.0, 30.0) < 8.0, "two forward passes"
    assert not said(world, "gives up")
    world = play(
        seed, (4.0, a_death_beside_a_newcomer), member_rules=RankRules(r19_gives_way=False, given_within=False), **BOTH
    )
    assert standstill(world, "a", 4.0, 30.0) > world.config.quorum_s


@pytest.mark.parametrize("seed", SEEDS)
def test_a_donor_that_is_full_is_asked_again(seed: int) -> None:
    full = set_all(full_until=6.0)
    world = play(seed, (4.0, kill("b")), (4.2, again(1)), (4.3, full), heal_s=5.0)
    assert [at for at in heals(world, "b") if 6.0 < at < 7.0], "at the donor's first free place, in the same quorum"
    assert len(said(world, "joined: b:2")) == 1
    assert standstill(world, "a", 6.5, 30.0) < 2.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_newcomer_that_no_donor_can_send_to_ends_and_the_others_go_on(seed: int) -> None:
    world = play(seed, (4.0, kill("b")), (4.2, again(1)), (4.3, unsendable(True)), (9.0, unsendable(False)))
    assert said(world, "ends: no donor can encode its state")
    assert standstill(world, "a", 4.5, 30.0) < 3.0
