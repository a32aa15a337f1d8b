"""Clients of the unary calls, which hold no lease and ask for a quorum at every step. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.lighthouse.view import Current
    from ft_core.protocol.types import Ask, Quorum


def keeps_id(
    previous: Quorum | None, current: Current | None, asks: Sequence[Ask], records: Mapping[str, Record]
) -> bool:
    """Clients of the unary calls ask every step: the id stays while the members do and nobody reports a failure."""
    return (
        previous is not None
        and current is not None
        and current.quorum_id == previous.quorum_id
        and previous.ids == tuple(ask.replica_id for ask in asks)
        and all(records[ask.replica_id].hello.unary and ask.commit_failures == 0 for ask in asks)
    )
