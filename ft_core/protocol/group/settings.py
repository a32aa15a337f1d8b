"""What a replica group's machine is run with, and the rules that the simulation can turn off. Values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Switches for the simulation: each rule that lives here can be turned off to show its need."""

    r12_accused: bool = True
    r12_moves: bool = True
    r12_ends: bool = True
    r12_pauses: bool = True
    r12_retold: bool = True
    r12_silent: bool = True
    """Of the ranks' ends: a rank that has asked ends if its leader falls silent."""
    r12_verdict_first: bool = True
    r12_void_ask: bool = True
    r12_withdraws: bool = True
    """Of the ranks' ends: a vote that has waited too long is taken back, and the leader says whether in time."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What a group is run with. Durations in seconds."""

    replica_id: str
    world_size: int
    liveness_s: float
    grace_s: float
    """How long the stream of a rank may be away."""
    connect_s: float
    """Within how long the ranks have to come."""
    drains: bool = False
    """An order to drain ends the group's asking: no rank enters another quorum, so all of them leave alike."""
    rules: GroupRules = GroupRules()
