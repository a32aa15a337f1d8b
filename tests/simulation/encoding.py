"""The real encoder over what the simulated lighthouse sends: a message that does not travel is a failure (I9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.control.lighthouse.unary_calls import room_status
from ft_core.errors import ConfigError, ProtocolError, RefusedError
from ft_core.protocol.lighthouse import events as room_events
from ft_core.protocol.pushes import Busy, Change, Lost, Over, Push, Reason, Refusal
from ft_core.rpc import codec
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from ft_core.protocol.lighthouse.room import Room


def check_travels(effect: room_events.Effect, room: Room, now: float) -> None:
    """Encode an effect as the lighthouse's shell does, and decode it as a client does. Raises Violation."""
    try:
        match effect:
            case room_events.Announce(quorum, _):
                codec.decode_push(codec.answer(1, codec.encode_quorum(quorum)))
                room_status(room, now).SerializeToString()
            case room_events.Explain(_, reason, paused_s):
                _round_trip(Reason(reason, paused_s))
                for text in room.held.values():
                    _round_trip(Reason(text, paused_s))
            case room_events.ChangePending(_, quorum_id, reason):
                _round_trip(Change(quorum_id, reason))
            case room_events.MemberLost(_, quorum_id, lost, held):
                _round_trip(Lost(quorum_id, lost, held))
            case room_events.Paused(_, quorum_id, who, for_s):
                _round_trip(Busy(quorum_id, who, for_s))
            case room_events.Superseded(_, quorum_id):
                _round_trip(Over(quorum_id))
            case room_events.Refuse(_, reason, _):
                _round_trip(Refusal(RefusedError(reason)))
            case room_events.Note():
                pass
    except (ConfigError, ProtocolError) as error:
        raise Violation("I9", f"{type(effect).__name__} does not travel: {error}") from error


def _round_trip(push: Push) -> None:
    codec.decode_push(codec.encode_push(push))
