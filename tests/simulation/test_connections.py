"""Directed runs: what happens to a training job when connections to its lighthouse end although the replicas live."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ft_core.protocol.lighthouse.rules import Rules
from tests.simulation.config import Config
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

LIVENESS, WINDOW, STEP = 1.0, 0.5, 0.3
"""Of `Config`: the liveness timeout, the boot window, and the longest forward pass."""


@dataclass
class Job:
    """Three groups that train for a while; then something happens to them."""

    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 1
    happens_at: float = 4.0

    def run(self, *happenings: tuple[float, Callable[[World], None]], until: float = 14.0) -> World:
        """Run to `until` with each happening at its instant after `happens_at`."""
        fields = {
            "groups": 3,
            "timeout_s": 30.0,
            "connect_s": 30.0,
            "autonomy_s": 60.0,
            "orphan_s": 90.0,
            **self.config,
        }
        world = World(self.seed, Config(**fields))
        world.start_lighthouse()
        for number in range(world.config.groups):
            world.spawn(number)
        for after, happening in happenings:
            world.at(self.happens_at + after, None, happening, world)
        world.until(until)
        return world


def group(world: World, name: str) -> Any:
    """The only process of that name."""
    return next(g for g in world.groups.values() if g.name == name)


def longest_silence(world: World, name: str, since: float) -> float:
    """The longest time without a commit of that group, from `since` to the end of the run."""
    commits = [t for t, text, args in world.story if text.startswith("%s commits") and str(args[0]).startswith(name)]
    edges = [since, *(t for t in commits if t >= since), world.now]
    return max(late - early for early, late in itertools.pairwise(edges))


def quorums(world: World, name: str) -> int:
    """How many quorums that group has entered."""
    return sum(text.startswith("%s enters") and str(args[0]).startswith(name) for _, text, args in world.story)


def frozen_then_a_new_lighthouse(world: World) -> None:
    group(world, "c").freeze()
    world.stop_lighthouse()


def a_new_lighthouse(world: World) -> None:
    world.start_lighthouse()


def test_a_frozen_replica_and_a_restart_of_the_lighthouse_cost_the_others_a_liveness_timeout() -> None:
    steps = [(0.0, frozen_then_a_new_lighthouse), (0.3, a_new_lighthouse)]
    for seed in range(10):
        world = Job(seed=seed).run(*steps)
        assert longest_silence(world, "a", 4.0) < 0.3 + LIVENESS + WINDOW + 3 * STEP, world.transcript(40)
    world = Job({"room_rules": Rules(r9_silent=False)}).run(*steps)
    assert longest_silence(world, "a", 4.0) > 5, "the rule is not needed, or the run does not show it"


def test_a_balancer_that_restarts_costs_no_step() -> None:
    """All connections close and are back after two seconds: nobody leaves a quorum that works."""

    def down(world: World) -> None:
        for one in world.active.values():
            one.proxy_down = True
            assert one.conn is not None
            one.conn.break_()

    def back(world: World) -> None:
        for one in world.active.values():
            one.proxy_down = False

    for seed in range(10):
        world = Job(seed=seed).run((0.0, down), (2.0, back))
        assert longest_silence(world, "a", 4.0) < 3 * STEP, world.transcript(40)
        assert quorums(world, "a") == quorums(Job(seed=seed).run(), "a")


def test_a_death_that_the_collectives_cannot_show_is_found_after_the_grace() -> None:
    """Forked workers hold the sockets of the dead: its closed connection is a suspicion, the others break off."""

    def dies(world: World) -> None:
        group(world, "c").die("is killed", hidden=True)

    for seed in range(10):
        world = Job({"supervised": False}, seed=seed).run((0.0, dies))
        assert longest_silence(world, "a", 4.0) < world.config.grace_s + 3 * STEP, world.transcript(40)
