"""What an event is: its version, the kinds of events, and the fields of each.

How it works. An event is one line of JSON: `t` (seconds since 1970, wall clock), `kind`, and the fields of its kind.
`KINDS` is the whole schema, and docs/events.md has the same table (a test compares them). The first line of every file
is of kind "log" and carries `v`, the version of the schema: readers refuse a file of another one. A field that is added
keeps the version; one that changes its meaning or goes away raises it.

Invariants: names of numbers end in their unit (`_s`: seconds, `bytes`) unless they count. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

VERSION = 1
VARIABLE = "FT_EVENTS"
"""The environment variable that names the folder of the event files; unset or empty: none are written."""
SUFFIX = ".jsonl"
TEXT_MAX = 500
"""Characters of a sentence in an event; what is longer is cut."""
NAMES_MAX = 1024
"""Entries of a list in an event."""

REPLICA, LIGHTHOUSE, FTRUN = "replica", "lighthouse", "ftrun"
ROLES = (REPLICA, LIGHTHOUSE, FTRUN)
"""Who writes a file."""
EVERYBODY = "everybody"

GAP_CAUSES = (
    "member lost", "member left", "change of membership", "veto", "heal", "pause", "pause of a peer", "broken", "slow",
)  # fmt: skip
"""What may have disturbed a group before a commit that came late."""
FIRST, LOST, LEFT, JOINED, SAME = "first", "member lost", "member left", "member joined", "same members"
QUORUM_CAUSES = (FIRST, LOST, LEFT, JOINED, SAME)
"""What has changed with a quorum: there was none before; of several changes the first in this list."""
VETO_CAUSES = (
    "error", "error of another member", "states differ", "share missing", "no gradient", "out of data", "stop",
    "batch weights", "no lease",
)  # fmt: skip
"""Why all agreed to skip a step."""
LOSS_SIGNS = ("supervisor", "connection", "silence", "goodbye", "absence")
"""How a loss was noticed: a supervisor's report; an end of the connection, or of its answers; it said goodbye; it did
not come back after the lighthouse was started again."""
PAIR_ROLES = ("starting", "active", "standby")
"""What a lighthouse of a pair does: it looks for the other one, it serves, it stands by."""
VOTE_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
"""Upper ends of the intervals in which `votes` of "counters" are counted; one more is for what took longer."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event."""

    role: str
    """Who writes it."""
    fields: Mapping[str, type]
    text: str
    """What it says."""


def _kind(role: str, text: str, /, **fields: type) -> Kind:
    return Kind(role, MappingProxyType(fields), text)


KINDS: Mapping[str, Kind] = MappingProxyType({
    # ------------------------------------------------------------ everybody
    "log": _kind(
        EVERYBODY, "the first line of each file: who writes it; `part` counts the files of one process from 0",
        v=int, role=str, source=str, host=str, pid=int, part=int, release=str,
    ),
    "dropped": _kind(
        EVERYBODY, "so many events could not be written since the last one that was", events=int, reason=str,
    ),
    "closed": _kind(EVERYBODY, "the log ends here in an orderly way"),
    # ------------------------------------------------------------ replica
    "made": _kind(
        REPLICA, "a Manager was made; of a group of several ranks only rank 0 writes", replica_id=str, ranks=int,
        step=int,
    ),
    "prefetch_begun": _kind(REPLICA, "a newcomer copies live state from running members before it asks"),
    "prefetch_ended": _kind(REPLICA, "it has, or nobody gave any", bytes=int, error=str),
    "asking": _kind(
        REPLICA, "it needs a quorum; `failed`: because it cannot follow the last one", reason=str, failed=bool,
        step=int,
    ),
    "waiting": _kind(REPLICA, "why there is no quorum yet, in the lighthouse's words, when that changes", reason=str),
    "entered": _kind(
        REPLICA, "the lighthouse has answered: the process groups of this quorum are being built", quorum_id=int,
        members=list, step=int, heals=bool, cause=str,
    ),
    "formed": _kind(REPLICA, "the process groups stand: it trains", quorum_id=int),
    "no_quorum": _kind(REPLICA, "the wait ended without a quorum", reason=str),
    "broken": _kind(
        REPLICA,
        "it cannot follow its quorum any more; `attempt_s` of work are lost, unless `moves`: the attempt goes on in "
        "the next quorum", quorum_id=int, reason=str, step=int, attempt_s=float, moves=bool,
    ),
    "vetoed": _kind(
        REPLICA, "all have agreed to skip a step, after `attempt_s` of work; `attempts` of them since the last such "
        "event", reason=str, step=int, attempt_s=float, attempts=int, cause=str,
    ),
    "heal_begun": _kind(
        REPLICA, "it begins to receive the state of `step` from these members", quorum_id=int, step=int, donors=list,
    ),
    "heal_ended": _kind(
        REPLICA, "the state is loaded (`ok`), or was given up; `seconds_s` of receiving; `donors` by address", ok=bool,
        bytes=int, seconds_s=float, donors=list, step=int, reason=str,
    ),
    "pause_begun": _kind(REPLICA, "the script has announced to be busy for at most `max_s`", reason=str, max_s=float),
    "pause_ended": _kind(REPLICA, "it is back", reason=str, seconds_s=float),
    "peer_paused": _kind(REPLICA, "another member has announced to be busy", replica_id=str, max_s=float),
    "gap": _kind(
        REPLICA, "a commit that came later than usual after the one before: what disturbed it first", cause=str,
        detail=str, seconds_s=float, usual_s=float, step=int,
    ),
    "counters": _kind(
        REPLICA, "once a second, while steps end: totals since the Manager was made; `trained_s` in committed steps, "
        "none longer than usual; `voted_s` in should_commit, and how many took how long", step=int, commits=int,
        vetoes=int, broken=int, usual_s=float, trained_s=float, voted_s=float, votes=list,
    ),
    "draining": _kind(REPLICA, "it is to leave at the next boundary", reason=str),
    "left": _kind(
        REPLICA, "it has said goodbye; `finished`: training is over", reason=str, finished=bool, step=int,
    ),
    # ------------------------------------------------------------ lighthouse
    "lighthouse_started": _kind(LIGHTHOUSE, "it listens", address=str, min_replicas=int),
    "lease_opened": _kind(LIGHTHOUSE, "a replica has connected, or is back", room=str, replica_id=str),
    "lease_ended": _kind(
        LIGHTHOUSE, "its connection has ended without a goodbye, `silence_s` after its last message", room=str,
        replica_id=str, silence_s=float,
    ),
    "quorum_formed": _kind(
        LIGHTHOUSE, "members at `step`; who joined, and who is not in it any more", room=str, quorum_id=int,
        members=list, step=int, joined=list, without=list, cause=str,
    ),
    "quorum_ended": _kind(
        LIGHTHOUSE, "it can complete nothing more; `lived_s` since it was formed or adopted", room=str, quorum_id=int,
        reason=str, lived_s=float,
    ),
    "member_lost": _kind(
        LIGHTHOUSE, "a member is lost, and the others were notified of it or had noticed it themselves; `how` the "
        "lighthouse noticed", room=str, quorum_id=int, replica_id=str, how=str, sign=str,
    ),
    "goodbye": _kind(
        LIGHTHOUSE, "a replica has left", room=str, replica_id=str, reason=str, finished=bool,
    ),
    "no_quorum_yet": _kind(LIGHTHOUSE, "why there is no quorum, when that changes", room=str, reason=str),
    "refused": _kind(LIGHTHOUSE, "a replica is refused for good", room=str, replica_id=str, reason=str),
    "pair": _kind(
        LIGHTHOUSE, "of two lighthouses: what this one does now, what it did `before`, and whether it hears the other "
        "one; `complete`: it has been told all that the other one knew; `took_over`: it stood by, and serves now",
        role=str, before=str, other=str, contact=bool, complete=bool, took_over=bool,
    ),
    "stood_still": _kind(LIGHTHOUSE, "the lighthouse itself did nothing for so long", seconds_s=float),
    # ------------------------------------------------------------ ftrun
    "run_started": _kind(
        FTRUN, "ftrun has begun", run_id=str, script=str, groups=list, total=int, ranks=int, lighthouse=str, chaos=str,
    ),
    "started": _kind(
        FTRUN, "the processes of a group were started; `warm`: a standby process was adopted", group=str, pids=list,
        warm=bool, restarts=int,
    ),
    "failed": _kind(
        FTRUN, "a worker of a group has ended by itself, and with it the group; `sentence` says how; `at_s`: when, "
        "wall clock", group=str, rank=int, pid=int, code=int, error=str, lived_s=float, sentence=str, excuse=str,
        at_s=float,
    ),
    "ended": _kind(FTRUN, "a group has ended for good: finished, drained, quarantined ...", group=str, how=str),
    "order": _kind(
        FTRUN, "what ftrun does to a group: drain, kill, freeze, thaw; `chaos`: because of --chaos", group=str,
        what=str, reason=str, chaos=bool,
    ),
    "resized": _kind(FTRUN, "ftrun resize", before=int, groups=int),
    "stopping": _kind(FTRUN, "everything is drained", reason=str),
    "run_ended": _kind(FTRUN, "the end of ftrun", status=int, restarts=int),
})  # fmt: skip

ADDED = frozenset({
    ("entered", "cause"), ("vetoed", "cause"), ("quorum_formed", "cause"), ("member_lost", "sign"),
    ("counters", "trained_s"), ("counters", "voted_s"), ("counters", "votes"),
})  # fmt: skip
"""Fields that older files of this version lack."""


def lacks(event: Mapping[str, Any]) -> str:
    """What an event lacks for those who read it, as a phrase; '': nothing. Fields that are not known do no harm."""
    kind = KINDS.get(event.get("kind", ""))
    if kind is None:
        return f"of an unknown kind {event.get('kind')!r}"
    if not isinstance(event.get("t"), int | float) or isinstance(event.get("t"), bool):
        return "without a time"
    for name, wanted in kind.fields.items():
        if name not in event:
            if (event["kind"], name) in ADDED:
                continue
            return f"{event['kind']} without {name}"
        value = event[name]
        good = isinstance(value, int | float) if wanted is float else type(value) is wanted
        if not good:
            return f"{event['kind']} with {name}={value!r}, which is no {wanted.__name__}"
    return ""


def check(event: Mapping[str, Any]) -> str:
    """What is wrong with an event that is about to be written, as a phrase; '': nothing."""
    extra = set(event) - set(KINDS[event["kind"]].fields) - {"t", "kind"} if event.get("kind") in KINDS else set()
    missing = [name for kind, name in sorted(ADDED) if kind == event.get("kind") and name not in event]
    if missing:
        return f"{event['kind']} without {missing[0]}"
    return lacks(event) or (f"{event['kind']} with a field {min(extra)!r} that is not in the schema" if extra else "")
