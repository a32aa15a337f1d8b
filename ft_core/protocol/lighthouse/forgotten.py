"""`Forgotten`: a quorum that neither of two lighthouses remembers, so that it is said (R22). Pure.

How it works. Who formed a quorum knows it, and tells the other lighthouse. So one that is presented, and that neither
this lighthouse nor the other one, in contact and heard out, knows of, was formed by a life of one of them that ended
before it could tell the other: both were started again before they met. That counts as a restart of the only lighthouse
(R9): what trained on out of reach meanwhile may be made again. An operator has to know. One that was presented while
the other lighthouse was out of reach, to one that it had told all before, was formed by it in its last moments: others
than those who present it are not missed, and nothing is said.

Invariant: one sentence per quorum. Ownership: `succession.Succession`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from ft_core.protocol.lighthouse.partner import Partner
    from ft_core.protocol.types import Basis


class Forgotten:
    """The newest quorum that was presented and that no lighthouse is known to remember."""

    def __init__(self) -> None:
        self._basis: Basis | None = None

    def __repr__(self) -> str:
        return f"Forgotten({self._basis})"

    def presented(self, basis: Basis, partner: Partner, *, known: bool) -> None:
        """A member presents it. `known`: to this lighthouse, from before."""
        last = partner.informed and not partner.stands_by
        if not known and not last and (self._basis is None or basis.quorum_id > self._basis.quorum_id):
            self._basis = basis

    def told(self, quorum_ids: Collection[int]) -> None:
        """The other lighthouse knows of these."""
        if self._basis is not None and self._basis.quorum_id in quorum_ids:
            self._basis = None

    def remark(self, partner: Partner) -> list[str]:
        """What to say now, once."""
        basis = self._basis
        if basis is None or not (partner.stands_by and partner.informed):
            return []
        self._basis = None
        names = ", ".join(basis.members[:4]) + (", ..." if len(basis.members) > 4 else "")
        return [
            f"neither this lighthouse nor {partner.address} remembers the quorum of {names}: each that knew it was "
            "started again before it had told the other. That counts as a restart of a single lighthouse: groups of "
            "the job that are out of reach may train on, and what they do is lost when they return. End those that do "
            "not come"
        ]
