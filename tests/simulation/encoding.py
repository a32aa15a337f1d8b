"""Every message of the simulation travels as the bytes that ship: what arrives is what the receiver decoded.

So a field that is not encoded is missed by the machine that needs it, and a message that breaks a bound, or that the
other side refuses, is a failure (I9).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ft_core.control.lighthouse.unary_calls import room_status
from ft_core.errors import ConfigError, ProtocolError
from ft_core.protocol.group import events as group_events
from ft_core.protocol.lighthouse import events as room_events
from ft_core.protocol.pushes import Acked, Push
from ft_core.rpc import codec
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ft_core.protocol.lighthouse.pair import Report
    from ft_core.protocol.lighthouse.room import Room

ROOM = "job"


@contextmanager
def _travels(message: object) -> Iterator[None]:
    try:
        yield
    except (ConfigError, ProtocolError) as error:
        raise Violation("I9", f"{type(message).__name__} does not travel: {error}") from error


def push(sent: Push) -> Push:
    """A push, as its receiver decodes it."""
    with _travels(sent):
        got = codec.decode_push(codec.encode_push(sent))
    assert got is not None, sent
    return replace(got, clock_s=sent.clock_s) if isinstance(sent, Acked) and isinstance(got, Acked) else got


def report(sent: Report) -> Report:
    """What one lighthouse sends the other, as that decodes it."""
    with _travels(sent):
        got = codec.decode_report(codec.encode_report(sent, "simulated"))
    assert got == sent, f"{sent} arrives as {got}"
    return got


def to_lighthouse(sent: room_events.Event) -> room_events.Event:
    """What a lease carries, as the lighthouse decodes it."""
    got: object
    with _travels(sent):
        match sent:
            case room_events.Hello():
                opening = codec.decode_lease_request(codec.encode_hello(sent, ROOM, "simulated"))
                assert isinstance(opening, codec.Opening)
                return replace(opening.hello, generation=sent.generation)
            case room_events.Asked(ask, generation):
                got = codec.decode_lease_request(codec.encode_lease(ask), ask.replica_id, generation)
                assert got == ask, f"{ask} arrives as {got}"
                return sent
            case room_events.Progress():
                data = codec.encode_lease(codec.Renewal(0.0, sent))
                got = codec.decode_lease_request(data, sent.replica_id, sent.generation)
                assert isinstance(got, codec.Renewal)
                return got.progress
            case room_events.Left():
                got = codec.decode_lease_request(codec.encode_lease(sent), sent.replica_id, sent.generation)
                assert isinstance(got, room_events.Left)
                return got
            case room_events.Incomplete():
                data = codec.encode_lease(codec.Broken(sent.quorum_id, sent.reason))
                got = codec.decode_lease_request(data, sent.replica_id, sent.generation)
                assert isinstance(got, room_events.Incomplete)
                return got
            case _:
                raise AssertionError(f"{sent} is no message")


def to_leader(sent: group_events.Event) -> group_events.Event:
    """What a rank's stream carries, as the leader of its group decodes it. Joining is a handshake of its own."""
    with _travels(sent):
        match sent:
            case group_events.RankAsked(rank, ask, room):
                asked = codec.decode_group_request(codec.encode_rank(codec.RankAsk(ask, room or "")))
                assert isinstance(asked, codec.RankAsk)
                return group_events.RankAsked(rank, asked.ask, asked.room or None)
            case group_events.RankVoted(rank, vote):
                voted = codec.decode_group_request(codec.encode_rank(vote))
                assert voted == vote, f"{vote} arrives as {voted}"
                return sent
            case group_events.RankBroke(rank, quorum_id, reason):
                broke = codec.decode_group_request(codec.encode_rank(codec.Broken(quorum_id, reason)))
                assert isinstance(broke, codec.Broken)
                return group_events.RankBroke(rank, broke.quorum_id, broke.reason)
            case _:
                return sent


def check_status(room: Room, now: float) -> None:
    """What the lighthouse answers to those who look at its room."""
    with _travels(room):
        room_status(room, now).SerializeToString()
