"""Sentences about replicas that are waited for, as users read them. Pure.

Invariant: the same situation has the same words, so that a reason is sent and logged once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_core.protocol.lighthouse.view import Seen, View

UNTIL = "it is waited for until it returns, its supervisor reports its end, or"
"""How a sentence about an absent holder of newer state goes on."""
PLAIN_PHASES = ("", "step")
"""The phases in which a replica is most of the time: not worth naming to users."""


def late(view: View, seen: Seen) -> str:
    """The sentence about a replica that is alive and was waited for in vain."""
    if seen.incomplete:
        return f"{seen.replica_id} cannot take part: {seen.incomplete}"
    return f"{seen.replica_id} is alive but did not arrive within {view.join_s:g} s ({story(view, seen)})"


def held(seen: Seen) -> str:
    """The sentence why it is no candidate yet; the same for as long as it waits, so that it is sent and logged once."""
    if seen.same_name:
        return (
            f"{seen.replica_id} waits to see whether {seen.same_name}, an earlier process of the same name, is still "
            "alive"
        )
    if seen.held_back:
        return seen.held_back
    for_s = max(1.0, seen.admitted_at - seen.asked_at)
    return (
        f"{seen.replica_id} is held back for {for_s:.0f} s: earlier processes of that name crashed repeatedly before "
        "their first commit"
    )


def story(view: View, seen: Seen) -> str:
    """The end of a sentence that a user reads: what is known of a replica."""
    where = f", last seen in {seen.phase}" if seen.phase not in PLAIN_PHASES else ""
    if seen.life.value == "up" and seen.paused_until > view.now:
        return f"paused{where}, for at most {seen.paused_until - view.now:.0f} s more"
    words = {
        "up": "alive",
        "closed": "connection closed",
        "lost": "connection closed, not back",
        "missed": "silent: frozen or cut off",
        "unknown": "not seen since the lighthouse started",
        "gone": "gone",
    }
    return f"{words[seen.life.value]}{where}"
