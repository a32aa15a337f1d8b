"""The back-off of a group that alone cannot build its process group: it joins later and later (R15). Pure.

How it works. Everybody in a quorum builds a process group; if one cannot (a host name that is not this machine's, no
file descriptors left), the quorum is over for all. An ask names whether its sender failed by itself (`Ask.unbuilt`), or
only learned that another one had; and whether its own machine was the reason (`unbuilt_here`) or something that may be
anybody's: a peer that did not come, a connection that was not made. `blame` compares the asks of one quorum. Held back
are those whose own machine was the reason, and newcomers that failed for whatever reason to groups that have committed,
for a time that doubles with every failure in a row and is ten times what the attempt cost the others at least. A group
that is no newcomer is held back from its third failure on; from its fifth on where it does not know the reason, was the
only one that failed, and reached all the others when it looked. Nobody is blamed for what a death explains. If all
groups name their own machine, only newcomers are held back; if there are none, the one that failed first is.

Invariants: one quorum is judged once; a name is forgiven when a step is committed with it; bounded by MAX_NAMES names.
Ownership: `room.Room` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ft_core.protocol.lighthouse.record import Record
    from ft_core.protocol.types import Ask, Quorum

FREE = 2
"""So many failures in a row cost nothing, except for a newcomer to those that have committed."""
FREE_UNSURE = 4
"""So many if it may be somebody else's doing, though nobody else failed and the network is well."""
DELAY_S = 1.0
DELAY_MAX_S = 30.0
COSTS = 10
"""Who is held back waits at least so many times as long as the others lost by its last attempt, up to COSTLY_MAX_S."""
COSTLY_MAX_S = 600.0
MAX_NAMES = 4096


class BuildLog:
    """Failures in a row to build a process group, per replica name."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._judged = 0

    def __repr__(self) -> str:
        return f"BuildLog({', '.join(f'{name}: {count}' for name, count in self._failures.items())})"

    def hold_back(
        self, quorum: Quorum | None, asks: Sequence[Ask], records: Mapping[str, Record], now: float
    ) -> list[str]:
        """Hold back who could not build the process group of the last quorum. Returns a line each.

        Args:
            quorum: that quorum; None: it is not known (the lighthouse was restarted).
            asks: of those who could form the next one.
            records: of the room; marked.
            now: instant.
        """
        if quorum is None:
            return []
        lost_s = max(0.0, now - quorum.created_ms / 1000)
        blamed = self.blame(quorum.quorum_id, quorum.ids, asks, records, lost_s)
        for replica_id, (for_s, why) in blamed.items():
            records[replica_id].admitted_at, records[replica_id].held_back = now + for_s, why
        return [why for _, why in blamed.values()]

    def blame(
        self,
        quorum_id: int,
        members: Collection[str],
        asks: Sequence[Ask],
        records: Mapping[str, Record],
        lost_s: float = 0.0,
    ) -> dict[str, tuple[float, str]]:
        """(seconds, sentence) of each who is to be held back before the next quorum forms of `asks`."""
        of = {ask.replica_id: ask for ask in asks if ask.quorum_id == quorum_id and ask.replica_id in members}
        # Whom it could not reach is `reachability`'s business.
        failed = {i: a for i, a in of.items() if a.unbuilt and (a.unbuilt_here or not a.unreachable)}
        if not failed or quorum_id == self._judged or len(of) < len(members):
            return {}  # somebody is gone: that explains it
        self._judged = quorum_id
        experienced = any(records[i].committed for i in of)
        new = {i for i in failed if not records[i].committed} if experienced else set()
        local = {i for i, ask in failed.items() if ask.unbuilt_here}
        if len(local) == len(of):  # what all complain about is one's doing
            local = set() if new else {min(local, key=lambda i: (records[i].asked_at, i))}
        only = {i for i, ask in failed.items() if len(failed) == 1 and {i, *ask.reached}.issuperset(members)}
        out: dict[str, tuple[float, str]] = {}
        for replica_id in sorted(new | local | only):
            ask, record = failed[replica_id], records[replica_id]
            free = 0 if replica_id in new else FREE if replica_id in local else FREE_UNSURE
            count = self._count(record.hello.name)
            if count > free:
                for_s = min(DELAY_MAX_S, DELAY_S * 2.0 ** (count - free - 1))
                for_s = max(for_s, min(COSTLY_MAX_S, COSTS * lost_s))
                out[replica_id] = for_s, _sentence(ask, count, for_s)
        return out

    def forgive(self, records: Iterable[Record]) -> None:
        """These have committed a step together: their process group works."""
        for record in records:
            self._failures.pop(record.hello.name, None)

    def _count(self, name: str) -> int:
        if name not in self._failures and len(self._failures) >= MAX_NAMES:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = self._failures.get(name, 0) + 1
        return self._failures[name]


def _sentence(ask: Ask, count: int, for_s: float) -> str:
    where = f" ({ask.store_address})" if ask.store_address else ""
    times = "" if count == 1 else f" {count} times in a row"
    return (
        f"{ask.replica_id}{where} could not build its process group{times} and is held back for {for_s:.0f} s, the "
        f"others go on: {ask.unbuilt}; look at its log, FT_HOSTNAME, FT_INTERFACE and the limit of open files there"
    )
