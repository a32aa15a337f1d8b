"""The real encoder over what the simulated lighthouse sends: a message that does not travel is a failure (I9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core import membership as room_events
from ft_core import wire
from ft_core.calls import room_status
from ft_core.errors import ConfigError, ProtocolError, RefusedError
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from ft_core.membership import Room


def check_travels(effect: room_events.Effect, room: Room, now: float) -> None:
    """Encode an effect as the lighthouse's shell does, and decode it as a client does. Raises Violation."""
    try:
        match effect:
            case room_events.Announce(quorum, _):
                wire.decode_lease_push(wire.answer(1, wire.encode_quorum(quorum)))
                room_status(room, now).SerializeToString()
            case room_events.Explain(_, reason, paused_s):
                _round_trip(wire.Reason(reason, paused_s))
                for text in room.held.values():
                    _round_trip(wire.Reason(text, paused_s))
            case room_events.ChangePending(_, quorum_id, reason):
                _round_trip(wire.Change(quorum_id, reason))
            case room_events.MemberLost(_, quorum_id, lost, held):
                _round_trip(wire.Lost(quorum_id, lost, held))
            case room_events.Paused(_, quorum_id, who, for_s):
                _round_trip(wire.Busy(quorum_id, who, for_s))
            case room_events.Superseded(_, quorum_id):
                _round_trip(wire.Over(quorum_id))
            case room_events.Refuse(_, reason, _):
                _round_trip(wire.Refusal(RefusedError(reason)))
            case room_events.Note():
                pass
    except (ConfigError, ProtocolError) as error:
        raise Violation("I9", f"{type(effect).__name__} does not travel: {error}") from error


def _round_trip(push: wire.Push) -> None:
    wire.decode_lease_push(wire.encode_push(push))
