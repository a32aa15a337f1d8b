"""A group's attempt that goes on in the next quorum (R19): all ranks go on, or none does (R12). Pure functions.

How it works. A rank that has launched nothing of its attempt when the quorum breaks asks at once, with `Ask.moves`. The
leader tells the others, each of which answers with such an ask or with its break. When all have asked so, the group
asks. One that has launched something, has voted, or asks for another reason loses the attempt for all: those that
wanted to go on are told that the group is broken, and have not asked.

Invariant: the group's open asks either all move, out of the same quorum, or none does.
Ownership: `group.Group`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ft_core.protocol.types import Ask


def moving_from(asks: Mapping[int, Ask]) -> int:
    """The quorum out of which ranks of the group want to go on; 0: none does."""
    return next((ask.quorum_id for ask in asks.values() if ask.moves), 0)


def why_it_stays(
    ask: Ask, quorum_id: int, asks: Mapping[int, Ask], broken: Collection[int], voted: Collection[int]
) -> str:
    """Why the attempt of a rank that asks to go on is lost; '': it is not, so far.

    Args:
        ask: the rank's.
        quorum_id: of the quorum that the group is in.
        asks: of the ranks that have asked.
        broken: quorums that are broken for the group.
        voted: attempts of that quorum on which a rank has voted, and there is no verdict.
    """
    if not quorum_id or ask.quorum_id != quorum_id or quorum_id in broken:
        return "another rank of this group cannot go on"
    if voted:
        return "another rank of this group has voted already"
    if any(not other.moves or other.quorum_id != quorum_id for other in asks.values()):
        return "another rank of this group has asked for the next step"
    return ""
