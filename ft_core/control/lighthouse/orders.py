"""Orders to replicas: drain and kill, by whoever may give them; sent over the leases. Runs on the loop of the rooms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.pushes import Order
from ft_core.rpc import codec

if TYPE_CHECKING:
    from ft_core.control.lighthouse.room_host import Rooms


def send_order(rooms: Rooms, room: str, replica: str, reason: str, *, kill: bool) -> list[str]:
    """Send an order to a replica_id, or to all of a name; in one room, or ('') in all. Returns who was sent it."""
    push = codec.encode_push(Order(kill, reason))
    told = []
    for shell in rooms.chosen(room):
        for replica_id, lease in shell.leases.items():
            record = shell.room.records.get(replica_id)
            if replica in (replica_id, record.hello.name if record else ""):
                lease.stream.send(push)
                told.append(replica_id)
                rooms.say(shell, f"{replica_id} is asked to {'exit' if kill else 'drain'}: {reason}")
    return told
