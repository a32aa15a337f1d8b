"""The rules of a room that are in force: all, except where the simulation shows the need of one. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """Switches for the simulation: each rule of DESIGN 3.9 that lives here can be turned off to show its need."""

    r1_ended: bool = True
    r1_closed: bool = True
    """A closed connection is no death; False: it is one after the grace, or at once with an accusation."""
    r2_no_amnesia: bool = True
    r9_boot: bool = True
    r9_silent: bool = True
    """After a restart of the lighthouse, a member that never returns is lost to its peers after a liveness timeout."""
    r14_in_force: bool = True
    r12_incomplete: bool = True
    pauses_told: bool = True
    """A replica that enters a quorum, or opens its lease anew, is sent the pauses that are open in it."""
    r9_only_trained: bool = True
    """Untrained groups wait for trained state (R9) only where somebody has shown that there is some."""
    r15_unbuilt: bool = True
    """A group that alone cannot build its process group is held back."""
    r18_claims: bool = True
    r21_not_again: bool = True
    """A job that has committed does not begin again at step 0 unasked."""
    r22_grows: bool = True
    """Of two lighthouses, each forms alone only what grows out of the last quorum."""
    r22_informed: bool = True
    """One that was started again and was not told what the other knows needs all members of that."""
    r22_remembers: bool = True
    """What both may have forgotten is not contradicted."""
    r22_gone: bool = True
    """Who was in no quorum of one lighthouse is not certainly gone: it may be in one of the other."""
    r22_proven: bool = True
    """The quorums of a room are those of both lighthouses: whose claims count (R18) is the same under either."""
    r22_met: bool = True
    """Who is away from one of them may have had a lease at the other until they met."""
    r22_silent: bool = True
    """A silence of the other lighthouse ends contact also before it is noticed: no state is called lost after it."""
    lazy_news: bool = True
    """No rule but a saving, whose absence must change nothing: newer stable versions alone decide nothing."""
    together: bool = True
    """No rule either: newcomers that arrive within a step of each other join together."""
    r4_members: bool = True
    """A member is not refused because of the model of a replica that is in no quorum."""
    places: bool = True
    """A quorum holds no more groups than fit into a message to each of them."""
    min_by_majority: bool = True
    """A larger min_replica_size of one group does not stop the others."""
    leave_out_unreachable: bool = True
    """Replicas that cannot reach each other are not put into one quorum."""
