"""The parameters of a run of the simulation, and how a seed draws them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from ft_core.protocol.group.settings import GroupRules
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.rank.settings import RankRules
from ft_core.settings import MAX_REPLICAS

FAULTS = (
    "kill", "freeze", "cut_lighthouse", "cut_peers", "cut_all", "blip", "lighthouse", "slow", "late", "soft", "leave",
    "pause", "duplicate", "configure", "heal", "skip", "turbulence", "hidden", "proxy", "oneway", "freeze_rank",
    "link", "full", "unsendable",
)  # fmt: skip


PAIR_FAULTS = ("lighthouse", "cut_pair", "cut_one", "freeze_lighthouse", "moment")
"""What befalls the two lighthouses of a pair."""


@dataclass(frozen=True)
class Config:
    """One run's parameters. Durations in simulated seconds, scaled down from the real ones."""

    groups: int = 3
    ranks: int = 1
    min_replicas: int = 1
    choosy: tuple[int, int] = (-1, 0)
    """A group that is configured with another min_replicas than the rest, and with which."""
    expected: int = 0
    places: int = MAX_REPLICAS
    """How many groups a quorum holds."""
    faults: tuple[str, ...] = ()
    fault_every_s: float = 1.0
    safety_s: float = 12.0
    liveness_bound_s: float = 45.0
    forward_s: float = 0.2
    liveness_s: float = 1.0
    grace_s: float = 0.1
    join_s: float = 1.0
    connect_s: float = 1.0
    timeout_s: float = 2.5
    heal_s: float = 0.8
    prefetches: bool = True
    """Newcomers copy live state before they ask."""
    copy_s: float = 0.2
    """So long it takes at most to copy live state."""
    prefetch_s: float = 20.0
    """So long copying may take in all, as in the product longer than a quorum."""
    quorum_s: float = 9.0
    """A rank whose ask is not answered within it gives up, and its group dies."""
    autonomy_s: float = 3.0
    orphan_s: float = 5.0
    boot_window_s: float = 0.5
    progress_s: float = 0.25
    """Four times per liveness timeout; a lighthouse with many leases asks for half of that."""
    settle_s: float = 0.0
    """After so long the lighthouse decides about what it has received: in a large room together with more."""
    reconnect_s: float = 0.15
    heals_before_forward: bool = False
    fixed_with_spares: bool = False
    allow_heal: bool = True
    finish_at: int = 0
    """Ranks run out of data at this step; 0: never."""
    rounds: bool = False
    """Data come in rounds of different lengths; out of data, some groups apply the commits and some trail."""
    ends_rounds: bool = False
    """The group that runs out first ends the pass for all."""
    supervised: bool = True
    bad_group: int = -1
    """A group whose heals never succeed."""
    bad_rank: int = -1
    """Only those of this rank of it; -1: of all."""
    cut_forever: tuple[int, int] = ()  # type: ignore[assignment]
    """Two groups that never reach each other."""
    seen_by_both: bool = True
    """Both of them find that out; False: only the first."""
    look_s: float = 1.0
    """How often who is left out because of a link looks whether it is whole again."""
    unbuilt_group: int = -1
    """A group that can never build a process group."""
    unbuilt_late: bool = True
    """It comes later than the others."""
    unbuilt_knows: bool = True
    """It knows that the reason is its own machine."""
    odd_group: int = -1
    """A group that is configured differently; it comes later than the others."""
    odd: str = ""
    """In what: "min" (a larger min_replica_size), "mode" (world_size_mode)."""
    compared: bool = True
    """Settings that have to be equal are part of the signature."""
    data: bool = True
    """Check that no sample is lost or comes twice; not where data run out by another rule."""
    drops_batches: bool = False
    """A batch whose step is not committed is left out, as frameworks do it; else it is trained on again."""
    user_ops: int = 0
    """Collectives that the script makes itself in each forward pass."""
    waits_for_ops: bool = True
    """The script waits for each of them; else should_commit does."""
    op_after: bool = False
    """The script makes one more after its backward, and waits for it nowhere."""
    absent: int = -1
    """A group that is not there at first."""
    inside: bool = False
    """The ranks of a group communicate in each forward pass, as those of a sharded model do."""
    late_rank: bool = False
    """The last rank of a group starts later than the others."""
    member_rules: RankRules = field(default_factory=RankRules)
    group_rules: GroupRules = field(default_factory=GroupRules)
    room_rules: Rules = field(default_factory=Rules)
    unique_ids: bool = True
    pair: bool = False
    """There are two lighthouses."""
    both_down: float = 0.0
    """How likely the last of them is killed, too, where it is its turn."""

    @staticmethod
    def draw(seed: int, **fixed: Any) -> Config:
        """A configuration for a seed: which faults may come together is itself random. `fixed` overrides fields."""
        rng = random.Random(seed * 7919 + 1)
        groups = rng.choice((2, 3, 3, 4))
        known = (*FAULTS, *PAIR_FAULTS[1:]) if fixed.get("pair") else FAULTS
        count = rng.choice((1, 2, 3, 4, len(known)))
        values: dict[str, Any] = {
            "groups": groups,
            "ranks": 2 if rng.random() < 0.2 else 1,
            "min_replicas": rng.randint(1, groups - 1) if rng.random() < 0.5 else 1,
            "expected": groups if rng.random() < 0.5 else 0,
            "faults": tuple(sorted(rng.sample(known, count))),
            "fault_every_s": rng.choice((0.5, 1.0, 2.0)),
            "heals_before_forward": rng.random() < 0.2,
            "fixed_with_spares": rng.random() < 0.15,
            "forward_s": rng.choice((0.1, 0.2, 0.4)),
            "finish_at": rng.choice((15, 30)) if rng.random() < 0.1 else 0,
            "supervised": rng.random() < 0.6,
            "rounds": rng.random() < 0.3,
            "ends_rounds": rng.random() < 0.3,
        }
        if rng.random() < 0.15:
            values["faults"] += ("stranger",)
        if rng.random() < 0.3:
            values |= {"user_ops": rng.choice((0, 1, 2)), "waits_for_ops": rng.random() < 0.6, "op_after": True}
            values["faults"] += ("skip_op",)
        values.update(fixed)
        if values["ranks"] > 1 and "faults" not in fixed and rng.random() < 0.6:
            values["faults"] += ("rank_stream", "late_vote")
            values.setdefault("late_rank", rng.random() < 0.3)
        if values["ranks"] > 1:
            values.setdefault("inside", rng.random() < 0.5)
        values.setdefault("drops_batches", rng.random() < 0.5)
        if rng.random() < 0.3:
            values = {"settle_s": rng.choice((0.01, 0.03)), "progress_s": 0.5} | values
        return Config(**values)
