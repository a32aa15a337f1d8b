"""Whose part of shared work is waited for, and what is answered to whoever asks for one. Pure; see `shared_work`.

Invariants: a wait is bounded by `limit_s`; who is past a place without a part of it never says "not yet".
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

ASK_S = 2.0
"""How long an owner may take to answer one question."""
SILENT_S = 5.0
"""An owner that answers nothing for so long is not waited for; with a broken quorum, ASK_S."""


OTHERWISE = (
    "its owner has something else to do at this place of the run (is the order of the data the same on all groups?), "
    "or could not send it"
)


class Position(NamedTuple):
    """A place in the run. It only grows, on each member."""

    step: int
    """Steps that were committed."""
    opened: bool
    """The next attempt is open (an accumulation window is under way)."""
    number: int
    """How many divisions were begun there before."""


class Heard(Enum):
    """What an owner's state server says when it is asked for its part."""

    THERE = b"T"
    NOT_YET = b"W"
    NEVER = b"N"
    SILENT = b""
    """Nothing: it was not reached, or did not answer in time."""
    REFUSED = b"-"
    """Its host says that nobody listens there: the process has ended."""


class Move(Enum):
    """What is done about a part of another member's."""

    TAKE = "take"
    WAIT = "wait"
    REPEAT = "repeat"


class Decision(NamedTuple):
    """A move, and why."""

    move: Move
    reason: str


def decide(heard: Heard, *, silent_s: float, waited_s: float, limit_s: float, broken: bool) -> Decision:
    """What to do about a part. Pure.

    Args:
        heard: its owner's answer.
        silent_s: how long the owner has answered nothing.
        waited_s: how long this member has waited since its own part was done.
        limit_s: longest it waits for a living owner.
        broken: the quorum is: somebody in it is lost.
    """
    if heard is Heard.THERE:
        return Decision(Move.TAKE, "it is there")
    if heard is Heard.NEVER:
        return Decision(Move.REPEAT, OTHERWISE)
    if heard is Heard.REFUSED:
        return Decision(Move.REPEAT, "its owner's process has ended")
    if heard is Heard.SILENT and silent_s >= (ASK_S if broken else SILENT_S):
        return Decision(Move.REPEAT, f"its owner answered nothing for {silent_s:.1f} s")
    if waited_s >= limit_s:
        return Decision(Move.REPEAT, f"its owner has not done it {waited_s:.0f} s after this replica's part was done")
    return Decision(Move.WAIT, "its owner is at it")


def stays(heard: Heard, *, silent_s: float, waited_s: float, limit_s: float, broken: bool) -> bool:
    """Whether a member that has everything stays for another one, as that can get its part from nobody else. Pure.

    That somebody has left and so ended the quorum is no reason to go: the others may lack this part still.

    Args:
        heard: the other's answer to whether it wants the part: NOT_YET if it does, or has yet to come to it.
        silent_s, limit_s, broken: as for `decide`.
        waited_s: how long this member has stayed.
    """
    if heard is Heard.SILENT:
        return silent_s < (ASK_S if broken else SILENT_S)
    return heard is Heard.NOT_YET and waited_s < limit_s


def answer(
    asked: Position, begun: Position, *, same_work: bool, broken: bool = False, asking: bool = False,
    launched: bool = False,
) -> Heard:  # fmt: skip
    """What to say about a part that is not there.

    Args:
        asked: where in the run it belongs.
        begun: where this rank is: its last division, or the place it came to since, with number -1.
        same_work: what this rank divided last is what is asked for.
        broken: the quorum that the work was divided in is broken here. So this rank gets to no other step without
            another quorum, in which who asks has to be.
        asking: it waits for that other one now, and gets to nothing more before.
        launched: it has launched gradients of the attempt that is open, and waits for the others'.
    """
    past = asked < begun or (asked == begun and not same_work) or (launched and asked[:2] == begun[:2])
    stuck = broken and (asked[:2] > begun[:2] or (asking and asked > begun))
    return Heard.NEVER if past or stuck else Heard.NOT_YET


def identity_of(quorum_id: int, digest: str) -> str:
    """What is divided, and among whom: members for which it differs do not share the work."""
    return f"{quorum_id:x}.{digest}"


def question(at: Position, identity: str, name: str) -> str:
    """The key of a part's result. Neither `identity` nor `name` may contain a slash."""
    return f"{at.step}/{int(at.opened)}/{at.number}/{identity}/{name}"


class Asked(NamedTuple):
    """A question to an owner."""

    key: str
    at: Position
    identity: str
    asker: int
    """The part of who asks."""
    offers: bool
    """It does not ask for a part, but whether its own is still wanted."""

    @property
    def quorum_id(self) -> int:
        """In which it was divided."""
        return int(self.identity.partition(".")[0], 16)


def asked_for(name: str) -> Asked | None:
    """What `key/asker`, or `key/asker?` of who offers its part, asks for; None: it is no question."""
    try:
        key, asker = name.rsplit("/", 1)
        step, opened, number, identity, _ = key.split("/")
        at, offers = Position(int(step), opened == "1", int(number)), asker.endswith("?")
        asked = Asked(key, at, identity, int(asker.removesuffix("?")), offers)
        return asked if asked.quorum_id >= 0 else None
    except ValueError:
        return None
