"""What a room has decided, sent over the leases and to the calls that wait for it.

A message to many is encoded once. Whoever has neither a lease nor a call gets nothing: what it has missed follows from
its next Hello. Called on the server's one loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.errors import FaultToleranceError, JobFinishedError, LighthouseError, RefusedError, StateLostError
from ft_core.protocol.lighthouse.events import ChangePending, MemberLost, Paused, Superseded
from ft_core.protocol.pushes import Busy, Change, Lost, Over, Push, Refusal
from ft_core.rpc import codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.control.lighthouse.room_shell import RoomShell
    from ft_core.protocol.lighthouse.events import Announce, Effect, Refuse


def announce(shell: RoomShell, effect: Announce) -> None:
    """Answer those who asked with a quorum."""
    shell.said = ""
    shared = codec.encode_quorum(effect.quorum)
    for replica_id, seq in effect.to:
        lease = shell.leases.get(replica_id)
        waiter = shell.waiters.get(replica_id)
        if lease is not None:
            lease.stream.send(codec.answer(seq, shared))
        elif waiter is not None and waiter.seq == seq and not waiter.done.done():
            waiter.done.set_result(effect.quorum)


def push(shell: RoomShell, effect: Effect) -> None:
    """Tell members of a quorum what has become of it, or of one of them."""
    to, message = _message(effect)
    data = codec.encode_push(message)
    for replica_id in to:
        lease = shell.leases.get(replica_id)
        if lease is not None:
            lease.stream.send(data)


def _message(effect: Effect) -> tuple[Sequence[str], Push]:
    match effect:
        case ChangePending():
            return effect.to, Change(effect.quorum_id, effect.reason)
        case MemberLost():
            return effect.to, Lost(effect.quorum_id, effect.lost, effect.held, effect.failed)
        case Paused():
            return effect.to, Busy(effect.quorum_id, effect.replica_id, effect.for_s)
        case Superseded():
            return (effect.to,), Over(effect.quorum_id)
    raise AssertionError(f"{effect} is not for members")


def refuse(shell: RoomShell, effect: Refuse) -> None:
    """End an ask for good. (A refused Hello has no lease: its stream is answered where it was opened.)"""
    lease, waiter = shell.leases.get(effect.to), shell.waiters.get(effect.to)
    if lease is not None:
        lease.stream.send(codec.encode_push(Refusal(refusal_of(effect))))
    elif waiter is not None and not waiter.done.done():
        waiter.done.set_exception(refusal_of(effect))


def end_all(shell: RoomShell, why: str) -> None:
    """End its leases and waiting calls: the other lighthouse of a pair serves from now on."""
    for lease in shell.leases.values():
        lease.stream.drop(why)
    for waiter in shell.waiters.values():
        if not waiter.done.done():
            waiter.done.set_exception(LighthouseError(why))


def refusal_of(effect: Refuse) -> FaultToleranceError:
    """The error that a replica sees."""
    return (JobFinishedError if effect.finished else StateLostError if effect.lost else RefusedError)(effect.reason)
