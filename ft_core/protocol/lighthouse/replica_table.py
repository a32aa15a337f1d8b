"""`ReplicaTable`: the records of one room's replicas, and how they age. Pure.

How it works. A hello makes a record or renews it. The end of a lease, a goodbye or a supervisor's report changes what
is believed of a replica. The rest is time: `age` turns closed leases into losses (`absence`), refuses a newcomer whose
namesake has turned out to live, and forgets replicas that nothing waits for any more.

Invariants: at most MAX_RECORDS records; a member of the quorum in force is never forgotten for a newcomer's sake; only
the newest stream of a replica (its `generation`) changes its life (R15).
Ownership: `room.Room` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.protocol.lighthouse.absence import Absences, Circumstances, became, forgotten, least_needed
from ft_core.protocol.lighthouse.admission import earlier_process, same_name
from ft_core.protocol.lighthouse.crash_backoff import CrashLog
from ft_core.protocol.lighthouse.events import Note
from ft_core.protocol.lighthouse.record import Record
from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.types import UNTRAINED
from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ft_core.protocol.lighthouse.events import Effect, Hello, LeaseEnded
    from ft_core.protocol.lighthouse.rules import Rules
    from ft_core.settings import LighthouseSettings

MAX_RECORDS = 4 * MAX_REPLICAS
SAME_NAME_LIVENESS = 1.5
"""Liveness timeouts after which an earlier process of a newcomer's name is known to live, if it has not gone silent."""
ENDED_HINT_GRACES = 5
"""Graces for which a supervisor's report about a name is remembered while the lease of that process still stands."""
CLOSED_BEFORE = 0.9
"""A lease that ends within so many liveness timeouts of its last message was closed; any later end is silence.

Keepalives go unanswered for a whole liveness timeout before they end a lease. A lease that ends sooner was closed: by
the kernel of a process that is gone, or by something in between."""


class ReplicaTable:
    """Records of one room's replicas.

    Args:
        settings: of the lighthouse.
        boot_at: when the lighthouse started, or forgot. All instants are seconds of one clock.
    """

    def __init__(self, settings: LighthouseSettings, boot_at: float) -> None:
        self.boot_until = boot_at + settings.boot_window_s
        """Until then replicas that were never seen are unknown, not missed (R9). It only moves ahead."""
        self._settings = settings
        self._records: dict[str, Record] = {}
        self._called: dict[str, dict[str, Record]] = {}
        """The same records by the replicas' names."""
        self.leaseless: dict[str, None] = {}
        """Everybody whose connection closed, or who was never seen, and perhaps others."""
        self._absences = Absences(settings, boot_at)
        self._crashes = CrashLog()

    def __repr__(self) -> str:
        return f"ReplicaTable({', '.join(f'{i}: {r.life.value}' for i, r in self._records.items()) or 'empty'})"

    @property
    def records(self) -> Mapping[str, Record]:
        """All records by replica_id, in the order in which the replicas came."""
        return self._records

    def validate(self) -> None:
        """Raise AssertionError unless every record is consistent."""
        assert len(self._records) <= MAX_RECORDS
        for replica_id, record in self._records.items():
            record.validate(replica_id)
            assert self._called[record.hello.name][replica_id] is record
            assert replica_id in self.leaseless or record.life not in (Life.CLOSED, Life.UNKNOWN)
        assert sum(len(called) for called in self._called.values()) == len(self._records)
        assert self.leaseless.keys() <= self._records.keys()

    # ------------------------------------------------------------ looking up

    def of_stream(self, replica_id: str, generation: int) -> Record | None:
        """The record of a replica whose newest stream this is."""
        record = self._records.get(replica_id)
        return record if record is not None and record.generation == generation else None

    def of_lease(self, replica_id: str, generation: int) -> Record | None:
        """The record of a replica whose lease runs on this stream."""
        record = self.of_stream(replica_id, generation)
        return record if record is not None and record.life is Life.UP else None

    def called(self, names: Iterable[str]) -> dict[str, Record]:
        """The records of these names or replica_ids."""
        found: dict[str, Record] = {}
        for name in names:
            found |= self._called.get(name, {})
            if name in self._records:
                found[name] = self._records[name]
        return found

    def named(self, members: Collection[str]) -> list[Record]:
        """The records of those that are known."""
        return [record for i in members if (record := self._records.get(i)) is not None]

    def living(self, replica_ids: Collection[str]) -> tuple[str, ...]:
        """Those that have a lease."""
        return tuple(i for i in replica_ids if (r := self._records.get(i)) is not None and r.life is Life.UP)

    def suspected(self, record: Record, now: float) -> bool:
        """Whether the other members of its quorum are notified that this replica is lost, or may be."""
        return self._absences.suspected(record, now)

    # ------------------------------------------------------------ what happens to replicas

    def hello(self, hello: Hello, members: Collection[str], now: float) -> Record | None:
        """The record of a replica that has opened a lease; None: there is no place for it.

        Args:
            hello: its presentation, which was admitted.
            members: of the quorum in force.
            now: instant.
        """
        record = self._records.get(hello.replica_id)
        if record is None:
            if len(self._records) >= MAX_RECORDS and not self._evict(members):
                return None
            record = Record(hello, Life.UP, now, hello.stable, hello.generation)
            record.admitted_at = self._crashes.not_before(hello.name, now)
            if earlier_process(hello, self._called.get(hello.name, {})):
                record.outlives(now + SAME_NAME_LIVENESS * hello.liveness_s)
            self._add(hello.replica_id, record)
        else:
            if record.is_other_process(hello):
                record.succeeded()  # the predecessor closed its connection: nothing is left of that one
            if hello.name != record.hello.name:
                self._not_called(record)
                self._called.setdefault(hello.name, {})[hello.replica_id] = record
            record.hello, record.generation = hello, hello.generation
            self.leaseless.pop(hello.replica_id, None)
            record.stable = max(record.stable, hello.stable)
            if record.life is not Life.UP:
                self._returns(record, now, member=hello.replica_id in members)
        record.opens(hello, now)
        return record

    def _add(self, replica_id: str, record: Record) -> None:
        self._records[replica_id] = record
        self._called.setdefault(record.hello.name, {})[replica_id] = record
        if record.life is Life.UNKNOWN:
            self.leaseless[replica_id] = None

    def _drop(self, replica_id: str) -> None:
        self._not_called(self._records.pop(replica_id))
        self.leaseless.pop(replica_id, None)

    def _not_called(self, record: Record) -> None:
        """It is forgotten, or has another name from now on."""
        called = self._called[record.hello.name]
        del called[record.hello.replica_id]
        if not called:
            del self._called[record.hello.name]

    def _returns(self, record: Record, now: float, *, member: bool) -> None:
        """A replica without a lease has one again."""
        if member and record.life is not Life.UNKNOWN:
            self._absences.returned(record, now)
        self._crashes.returned(record)
        record.life, record.since, record.presumed_dead = Life.UP, now, False

    def expect(self, members: Collection[str], presenter: Hello, now: float) -> None:
        """Make a record of each member of a presented quorum that was not seen under this boot (R9).

        Of two living processes of one name the member is the earlier one, whichever came first after a restart.
        """
        for replica_id in members:
            record = self._records.get(replica_id)
            if record is None and len(self._records) < MAX_RECORDS:
                self._add(replica_id, Record.unseen(replica_id, presenter, now))
            elif record is not None and record.same_name_until:
                record.same_name_until = record.admitted_at = 0.0
                for other_id, other in self._called[record.hello.name].items():
                    if other_id not in members and other.life is Life.UP:
                        other.outlives(now + SAME_NAME_LIVENESS * other.hello.liveness_s)

    def lease_ended(self, event: LeaseEnded, now: float, *, broken: bool) -> list[Note]:
        """A lease stream ended without a goodbye. `broken`: a member reported that its quorum has failed."""
        record = self.of_lease(event.replica_id, event.generation)
        if record is None:
            return []
        if now < record.ended_hint_until:
            return [self._ended(event.replica_id, record, now)]
        closed = event.silence_s < CLOSED_BEFORE * record.hello.liveness_s
        record.life, record.since = (Life.CLOSED if closed else Life.MISSED), now
        self.leaseless[event.replica_id] = None
        # Whose collectives failed may have reported it before this stream ended: it is the second witness all the same.
        record.peer_reported_failure, record.ask = broken and record.ask is None, None
        # What a closed connection amounts to is noted when it is known (`age`).
        return [] if closed else [Note(f"{event.replica_id} went silent (frozen or cut off)")]

    def reported_ended(self, name: str, now: float) -> list[Note]:
        """A supervisor saw the end of a process: of this replica_id, or of every process of this name."""
        named = self.called((name,))
        # The report about a name can arrive after its next incarnation, whose lease then stands: that one is not meant.
        # But the report can also be faster than the end of the lease that it is about.
        slow = any(r.life not in (Life.UP, Life.GONE) for r in named.values())
        notes = []
        for replica_id, record in named.items():
            if record.life is Life.UP and name != replica_id:
                if not slow and not record.same_name_until:
                    record.ended_hint_until = now + ENDED_HINT_GRACES * self._settings.grace_s
            elif record.life is not Life.GONE:
                notes.append(self._ended(replica_id, record, now))
        return notes

    def _ended(self, replica_id: str, record: Record, now: float) -> Note:
        record.goes(now)
        self._crashes.died(record, now)
        return Note(f"{replica_id} ended, says its supervisor")

    def turbulence(self, now: float) -> Note:
        """Most connections dropped together: no end of a lease proves anything before they could be opened again."""
        self.boot_until = max(self.boot_until, now + self._settings.boot_window_s)
        self._absences.turbulent_until = self.boot_until
        return Note("most connections dropped together: waiting for them to come back before believing any death")

    def announce_losses_again(self, members: Iterable[Record]) -> None:
        """Not all members may have received what was announced of the others."""
        for record in members:
            if not record.agreed:
                record.loss_announced = False

    def committed(self, members: Collection[str]) -> None:
        """These have got past their first commit (R15)."""
        self._crashes.committed(self.named(members))

    # ------------------------------------------------------------ time

    def age(
        self, members: Collection[str], now: float, rules: Rules, *, alone: bool
    ) -> tuple[list[Effect], list[float]]:
        """Draw what follows from leases that are closed, unknown or silent for long enough.

        `alone`: there is no other lighthouse, which may put into a quorum who has left this one untrained (R22).
        Returns what to do about it, and instants at which more may follow.
        """
        out: list[Effect] = []
        looks: list[float] = []
        closed = sum(record.life is not Life.UP for record in self.named(members))
        for replica_id, record in list(self._records.items()):
            if record.life is Life.UP and not record.same_name_until:
                continue  # nearly all: there is nothing to find out about them
            if record.same_name_until:
                if earlier := self._outlived_by(record, now):
                    self._drop(replica_id)
                    out.append(same_name(earlier, record.hello))
                    continue
                looks.append(record.same_name_until)
            harmless = (alone or not rules.r22_gone) and replica_id not in members and record.stable <= UNTRAINED
            around = Circumstances(harmless, 2 * closed > len(members), self.boot_until, rules)
            life, at = self._absences.look(record, now, around)
            looks += at
            if life is not record.life:
                out += self._turn(replica_id, record, life, now)
            if replica_id in self.leaseless and record.life not in (Life.CLOSED, Life.UNKNOWN):
                del self.leaseless[replica_id]
            if replica_id not in members and forgotten(record, now):
                self._drop(replica_id)
        if self._records:
            looks.append(self._absences.doubt_until)
        return out, looks

    def _turn(self, replica_id: str, record: Record, life: Life, now: float) -> list[Note]:
        """Time has shown what became of a replica."""
        was = record.life
        record.turns(life, now)
        if was is Life.CLOSED:
            self._crashes.died(record, now)
        return [Note(text) for text in became(replica_id, record, was)]

    def _outlived_by(self, record: Record, now: float) -> str:
        """The earlier process of a newcomer's name, if it was given the time to end and lives; '': none.

        The newcomer is admitted as soon as there is none.
        """
        earlier = earlier_process(record.hello, self._called[record.hello.name])
        if not earlier:
            record.same_name_until, record.admitted_at = 0.0, self._crashes.not_before(record.hello.name, now)
        return earlier if now >= record.same_name_until else ""

    def _evict(self, members: Collection[str]) -> bool:
        """Forget somebody for a newcomer. False: everybody may be needed."""
        least = least_needed(self._records, members)
        if least:
            self._drop(least)
        return bool(least)
