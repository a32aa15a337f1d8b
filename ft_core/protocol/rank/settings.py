"""What a rank's steps are run with, and which rules of the protocol (the simulation turns single ones off). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.protocol.rank.heal_plan import WorldSizeMode

RETRY_SLACK = 2
"""R11: a member whose own failures veto the step gives up first; the others wait this many more vetoes."""


@dataclass(frozen=True, slots=True)
class RankRules:
    """Switches for the simulation: each rule of DESIGN 3.9 that lives here can be turned off to show its need."""

    r0_verdict: bool = True
    r0_tag: bool = True
    r2_healed: bool = True
    r3_autonomy: bool = True
    r3_waits: bool = True
    r4_aligned: bool = True
    r4_user_ops: bool = True
    r7_void: bool = True
    r10_divisor: bool = True
    r10_ready: bool = True
    r11_no_veto: bool = True
    r12_alike: bool = True
    pauses_extend: bool = True
    given_within: bool = True
    r15_stale: bool = True
    r16_parting: bool = True
    r17_shares: bool = True
    r19_moves: bool = True
    r19_gives_way: bool = True
    r19_groups: bool = True
    r19_positions: bool = True


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank's steps are run with. Durations in seconds."""

    replica_id: str
    group_rank: int = 0
    group_world_size: int = 1
    min_replicas: int = 1
    mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    timeout_s: float = 60.0
    """How long a collective waits for a peer that has announced no pause."""
    autonomy_s: float = 600.0
    orphan_s: float = 900.0
    look_s: float = 5.0
    """How often a rank that waits for a quorum looks whether it reaches the members of its last one."""
    max_retries: int | None = None
    exits_on_drain: bool = False
    """An order to drain ends this rank at the next boundary; False: the training loop decides."""
    rules: RankRules = RankRules()


def gives_up(own_failures: int, vetoes: int, max_retries: int | None) -> str:
    """Why a member with so many failures and vetoes in a row must stop retrying, or ''."""
    if max_retries is None:
        return ""
    if own_failures > max_retries:
        return f"{own_failures} attempts in a row failed on this replica (max_retries={max_retries})"
    if vetoes > max_retries + RETRY_SLACK:
        return f"{vetoes} attempts in a row were not committed (max_retries={max_retries})"
    return ""
