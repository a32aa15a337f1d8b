"""`OtherLighthouse`: what the rooms of one of two lighthouses need to know of the other, and tell it (R22)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ft_core.control.lighthouse.room_shell import RoomShell
    from ft_core.dashboard.sample import PairSample
    from ft_core.protocol.lighthouse.partner import Proposal, Told
    from ft_core.protocol.lighthouse.room import Room


class OtherLighthouse(Protocol):
    """The other lighthouse of a pair, as `partner_link.PartnerLink` reaches it."""

    @property
    def serves(self) -> bool:
        """This lighthouse, not the other one, takes leases and calls."""

    @property
    def refusal(self) -> str:
        """What clients are told while this one does not."""

    @property
    def standing(self) -> PairSample:
        """What this one does, for whom, and since when."""

    def known(self, room: str) -> tuple[Told, ...]:
        """What is known of a room that is made now. Raises RefusedError if there is no place for one more."""

    def keeps(self, room: Room) -> None:
        """A room makes place for another one: what R22 needs of it is written down."""

    def is_made(self, shell: RoomShell) -> None:
        """A room was made."""

    def decided(self, shell: RoomShell) -> None:
        """A room has decided something."""

    def propose(self, proposal: Proposal) -> None:
        """Have the other one record a quorum."""
