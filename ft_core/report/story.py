"""What one replica group did when: its time as segments of one state each, and what happened in it. Pure.

How it works. `tell` goes through the events of the group (those that its processes wrote, and what ftrun wrote about
it) in the order of time, and keeps the state that the group is in; each change ends a segment. Work that turns out to
be lost is known afterwards only: the end of the segment before is then taken back.

Invariants: segments follow each other without overlap, none is empty, and together they are the time in which the group
was part of the job. Instants are wall-clock seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Event = dict[str, Any]


class State(Enum):
    """What a second of a group went into."""

    TRAINING = "training"
    """A step that was committed."""
    LOST = "lost steps"
    """A step that was not, or in a quorum that it cannot follow any more."""
    WAITING = "waiting"
    """For a quorum, or for a peer that has announced to be busy."""
    HEALING = "healing"
    PAUSED = "paused"
    """By its own script: validation, saving."""
    FROZEN = "frozen"
    """By --chaos; otherwise nobody can know."""
    RESTARTING = "restarting"
    """From its death to where the next process asks for a quorum."""
    STARTING = "starting"
    """The same for the first process."""
    ENDING = "ending"
    """After its goodbye."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One state for a while."""

    begin: float
    end: float
    state: State
    whom: str = ""
    """Who is waited for, or what for."""

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at an instant: "death", "heal" or "drain"."""

    t: float
    kind: str
    text: str


@dataclass
class Story:
    """One group."""

    name: str
    segments: list[Segment] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    gaps: list[Event] = field(default_factory=list)
    counters: list[Event] = field(default_factory=list)
    heals: list[Event] = field(default_factory=list)
    """Heals that ended well."""
    ended: str = ""
    """How it ended for good, as ftrun says."""

    def seconds(self, state: State) -> float:
        """All of them in a state."""
        return sum(segment.seconds for segment in self.segments if segment.state is state)

    def trains_again(self, t: float) -> float | None:
        """When it trains for the first time after `t`; None: not any more."""
        return next((s.begin for s in self.segments if s.state is State.TRAINING and s.begin > t), None)


def name_of(replica_id: str) -> str:
    """The stable part of a replica_id."""
    return replica_id.rpartition(":")[0] or replica_id


def plain(text: str) -> str:
    """A sentence without the words that tell the processes of a name apart, for tables."""
    return re.sub(r"(?<=[\w.-]):[0-9a-f]{8}\b", "", text)


def whom(reason: str, names: Iterable[str], me: str) -> str:
    """Who is waited for, out of the lighthouse's sentence; '' if it names nobody."""
    here = {name_of(word) for found in re.findall(r" here \(([^)]*)\)", reason) for word in re.split(", ", found)}
    rest = re.sub(r" here \([^)]*\)", "", reason)
    others = [name for name in names if name != me]
    named = [name for name in others if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", rest)]
    if not named and "the others" in rest and here:
        named = [name for name in others if name not in here]
    if len(named) > 3:
        return f"{named[0]} and {len(named) - 1} more"
    return ", ".join(named)


BUILDING = "process groups are built"
ANSWER = "the lighthouse's answer"


class _Teller:
    """Goes through the events of one group."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self.story = Story(name)
        self._names = names
        self._state: State | None = None
        self._whom = ""
        self._since = 0.0
        self._pauses = 0
        self._frozen = self._heals = self._copies = False
        self._watched = False
        """ftrun has started it, and will say when its process ends."""
        self._alive = False
        """A process of it has written, and was not seen to end."""
        self._last = 0.0
        """When that process wrote last."""

    # ------------------------------------------------------------ segments

    def to(self, t: float, state: State | None, whom: str = "") -> None:
        """From now on it is in that state."""
        self.cut(t)
        self._state, self._whom = state, whom

    def cut(self, t: float) -> None:
        """End the segment here; the next one has the same state."""
        t = max(t, self._since)
        if self._state is not None and t > self._since:
            state = self._state
            if self._frozen:
                state = State.FROZEN
            elif self._pauses and state is State.TRAINING:
                state = State.PAUSED
            last = self.story.segments[-1] if self.story.segments else None
            if last is not None and last.end == self._since and (last.state, last.whom) == (state, self._whom):
                self.story.segments[-1] = replace(last, end=t)
            else:
                self.story.segments.append(Segment(self._since, t, state, self._whom))
        self._since = t

    def take_back(self, t: float, seconds: float, state: State, whom: str = "") -> None:
        """The last seconds before `t`, as far as they were training, were something else."""
        self.cut(t)
        begin, kept = t - seconds, []
        segments = self.story.segments
        while segments and segments[-1].end > begin:
            segment = segments.pop()
            if segment.state is not State.TRAINING:
                kept.append(segment)
                continue
            start = max(segment.begin, begin)
            kept.append(Segment(start, segment.end, state, whom))
            if segment.begin < start:
                kept.append(replace(segment, end=start))
        segments += reversed(kept)

    # ------------------------------------------------------------ events

    def see(self, event: Event) -> None:
        """One event, in the order of time."""
        call = HANDLERS.get(event["kind"])
        if call is not None:
            call(self, event, float(event["t"]))
        if event["kind"] not in OF_FTRUN:
            self._last = float(event["t"])

    def died(self, t: float, text: str) -> None:
        """Its processes are gone, unasked."""
        self._frozen, self._pauses, self._heals, self._copies, self._alive = False, 0, False, False, False
        self.to(t, State.RESTARTING)
        self.story.marks.append(Mark(t, "death", text))

    def started(self, event: Event, t: float) -> None:
        del event
        self._watched = True
        self.to(t, State.RESTARTING if self.story.segments else State.STARTING)

    def failed(self, event: Event, t: float) -> None:
        self.died(min(t, float(event["at_s"])), event["excuse"] or event["sentence"])

    def group_ended(self, event: Event, t: float) -> None:
        self._alive = self._watched = False
        self.story.ended = event["how"]
        self.to(t, None)

    def ordered(self, event: Event, t: float) -> None:
        if event["what"] in ("freeze", "thaw"):
            self.cut(t)
            self._frozen = event["what"] == "freeze"

    def made(self, event: Event, t: float) -> None:
        del event
        if self._alive and self._state not in (State.ENDING, None):  # nobody saw the last process end
            self.died(self._last, "its process ended, nobody saw how")
        if self._state not in (State.STARTING, State.RESTARTING):
            self.to(t, State.RESTARTING if self.story.segments else State.STARTING)
        self._alive = True

    def copies(self, _: Event, t: float) -> None:
        self._copies = True
        self.to(t, State.HEALING)

    def copied(self, _: Event, t: float) -> None:
        self._copies = False
        self.to(t, State.WAITING, ANSWER)

    def asks(self, _: Event, t: float) -> None:
        if not self._copies:
            self.to(t, State.WAITING, ANSWER)

    def waits(self, event: Event, t: float) -> None:
        if self._state is State.WAITING:
            # It had waited for just that, until the lighthouse explained it.
            named = whom(event["reason"], self._names, self.story.name)
            named = named or plain(event["reason"]).removeprefix("waiting for ")
            if self._whom == ANSWER:
                self._whom = named
            self.to(t, State.WAITING, named)

    def entered(self, _: Event, t: float) -> None:
        self.to(t, State.WAITING, BUILDING)

    def formed(self, _: Event, t: float) -> None:
        self.to(t, State.HEALING if self._heals else State.TRAINING)

    def heals(self, _: Event, t: float) -> None:
        self._heals = True
        if self._state is State.TRAINING:
            self.to(t, State.HEALING)

    def healed(self, event: Event, t: float) -> None:
        self._heals = False
        if self._state is State.HEALING:
            self.to(t, State.TRAINING)
        if event["ok"]:
            self.story.heals.append(event)
            self.story.marks.append(Mark(t, "heal", f"healed to step {event['step']}: {event['bytes'] / 1e6:.1f} MB"))

    def broke(self, event: Event, t: float) -> None:
        if not event["moves"]:
            self.take_back(t, event["attempt_s"], State.LOST)
        self._heals = False
        self.to(t, State.LOST)

    def vetoed(self, event: Event, t: float) -> None:
        self.take_back(t, event["attempt_s"], State.LOST)

    def paused(self, _: Event, t: float) -> None:
        self.cut(t)
        self._pauses += 1

    def unpaused(self, _: Event, t: float) -> None:
        self.cut(t)
        self._pauses = max(0, self._pauses - 1)

    def gap(self, event: Event, t: float) -> None:
        self.story.gaps.append(event)
        if event["cause"] == "pause of a peer":
            late_s = max(0.0, event["seconds_s"] - event["usual_s"])
            self.take_back(t - event["usual_s"], late_s, State.WAITING, name_of(event["detail"]))

    def counted(self, event: Event, t: float) -> None:
        del t
        self.story.counters.append(event)

    def left(self, event: Event, t: float) -> None:
        self._pauses, self._frozen, self._heals = 0, False, False
        self.to(t, State.ENDING)
        if not event["finished"]:
            self.story.marks.append(Mark(t, "drain", f"left: {event['reason']}"))

    def closed(self, _: Event, t: float) -> None:
        self._alive = False
        self.to(t, State.ENDING if self._watched else None)


HANDLERS: Mapping[str, Any] = {
    "started": _Teller.started, "failed": _Teller.failed, "ended": _Teller.group_ended, "order": _Teller.ordered,
    "made": _Teller.made, "prefetch_begun": _Teller.copies, "prefetch_ended": _Teller.copied, "asking": _Teller.asks,
    "waiting": _Teller.waits, "entered": _Teller.entered, "formed": _Teller.formed, "heal_begun": _Teller.heals,
    "heal_ended": _Teller.healed, "broken": _Teller.broke, "vetoed": _Teller.vetoed, "pause_begun": _Teller.paused,
    "pause_ended": _Teller.unpaused, "gap": _Teller.gap, "counters": _Teller.counted, "left": _Teller.left,
    "closed": _Teller.closed,
}  # fmt: skip
OF_FTRUN = frozenset({"started", "failed", "ended", "order"})


def tell(name: str, events: Iterable[Event], names: Sequence[str], end: float) -> Story:
    """The story of one group.

    Args:
        name: of the group.
        events: those of its processes, and ftrun's about it.
        names: of all groups of the job.
        end: of the job.
    """
    teller = _Teller(name, names)
    for event in sorted(events, key=_when):
        teller.see(event)
    teller.to(end, None)
    return teller.story


def _when(event: Event) -> float:
    """A death counts from when it happened, not from when ftrun wrote it."""
    return float(min(event["t"], event.get("at_s", event["t"])))
