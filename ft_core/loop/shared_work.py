"""Work between two steps that the members of a quorum divide among them: evaluation, prediction.

How it works. The members hold the same state, so whoever does a part of such work gets what any other would get. Each
member does one part, publishes what came of it at its state server, and fetches the other parts from their owners. A
part that does not come (its owner died, froze, or is somewhere else in the run) is done again by every member that
misses it, by itself. So nothing has to be agreed on: a missing part costs time and changes no result, and no member
depends on another one's word to go on. `shared_work_rules` decides whom to wait for. A member that has everything asks
the others whether they still want its part, and stays until none does: what follows may be the end of its process.

A part is asked for by where in the run it belongs (`Position`), and by a digest of the quorum and of what is divided:
members that mean something else do not share it.

Invariants: a wait is bounded by what the own part took, or by the Manager's `timeout` if that is longer; at most KEPT
results are kept. The ranks of a group miss the same parts (`agree`), because they go through the work together.
Threads: the training thread divides and exchanges; connection threads of the state server answer (`Board`, one lock).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ft_core.checkpointing.packing import pack, unpack
from ft_core.errors import EncodingError, HealError
from ft_core.loop.shared_work_rules import (
    ASK_S,
    Heard,
    Move,
    Position,
    answer,
    asked_for,
    decide,
    identity_of,
    question,
    stays,
)
from ft_core.protocol.rank.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ft_core.manager import Manager
    from ft_core.protocol.rank.heal_plan import Plan

log = logging.getLogger("ft_core")
PREFIX = "part:"
"""Of the names under which parts are asked for."""
KEPT = 8
"""Results that are served at a time; an older one is given up for a newer one."""
RESULT_BYTES_MAX = 1 << 30
"""A larger result is not sent: every member does that part by itself."""
PAUSE_S = 0.002, 0.1
"""Between two rounds of questions: at first, and at most."""


class Place(NamedTuple):
    """Where a rank is, between the calls of its script."""

    step: int
    opened: bool
    """See `Position`."""
    broken: int = 0
    """Id of its quorum, if that is broken."""
    asking: bool = False
    """Its training thread waits for another quorum."""
    launched: bool = False
    """Gradients of the attempt that is open travel: nothing is divided before its vote any more."""


class Board:
    """What this rank has to say about its parts. Any thread."""

    def __init__(self, place: Callable[[], Place]) -> None:
        """`place`: where this rank is now; called on any thread."""
        self._place = place
        self._lock = threading.Lock()
        self._at = Position(-1, False, 0)
        """Of the division begun last."""
        self._identity = ""
        self._results: OrderedDict[str, bytes | None] = OrderedDict()
        self._wanted: dict[str, set[int]] = {}
        """Of this division, by result: the parts that this rank still asks for."""
        self._given_up: set[str] = set()
        """Keys of this division's results that are kept no more: to who asks, that is no "not yet"."""

    def __repr__(self) -> str:
        return f"Board({self._at}, {len(self._results)} results)"

    def begin(self, identity: str) -> Position:
        """A division begins here. Returns its position."""
        step, opened = self._place()[:2]
        with self._lock:
            same = self._at[:2] == (step, opened)
            self._at = Position(step, opened, self._at.number + 1 if same else 0)
            self._identity = identity
            self._given_up.clear()
            self._wanted.clear()
            return self._at

    def publish(self, key: str, result: bytes | None) -> None:
        """From now on others can have it; None: it cannot be sent."""
        with self._lock:
            self._results[key] = result
            while len(self._results) > KEPT:
                oldest, _ = self._results.popitem(last=False)
                self._given_up.add(oldest)

    def want(self, key: str, parts: Collection[int]) -> None:
        """These parts will be asked for, until each is `decided`. Before this rank's own is published."""
        with self._lock:
            self._wanted[key] = set(parts)
            if len(self._wanted) > KEPT:
                oldest = next(iter(self._wanted))
                del self._wanted[oldest]
                self._given_up.add(oldest)

    def decided(self, key: str, part: int) -> None:
        """It came, or is done here: it is asked for no more."""
        with self._lock:
            self._wanted[key].discard(part)

    def answer(self, name: str) -> bytes | None:
        """To a question; None: it is none."""
        asked = asked_for(name)
        if asked is None:
            return None
        place = self._place()
        with self._lock:
            if asked.offers and asked.key in self._wanted:
                wanted = asked.asker in self._wanted[asked.key]
                return Heard.NOT_YET.value if wanted else Heard.NEVER.value
            if not asked.offers and asked.key in self._results:
                result = self._results[asked.key]
                return Heard.NEVER.value if result is None else Heard.THERE.value + result
            if asked.key in self._given_up:
                return Heard.NEVER.value
            begun = self._at if self._at[:2] == place[:2] else Position(*place[:2], -1)
            same = asked.identity == self._identity
            return answer(
                asked.at, begun, same_work=same, broken=bool(place.broken) and asked.quorum_id == place.broken,
                asking=place.asking, launched=place.launched,
            ).value  # fmt: skip


@dataclass(frozen=True)
class Owners:
    """Who divides: addresses of their state servers, in the order of their parts."""

    addresses: tuple[str, ...]
    mine: int
    quorum_id: int

    @classmethod
    def of(cls, plan: Plan | None, group_rank: int) -> Owners | None:
        """The members of a quorum that hold its state; None where this one has to work alone."""
        if plan is None:
            return None
        members = plan.quorum.members
        able = [r for r, m in enumerate(members) if r in plan.healing or m.version == plan.target]
        addresses = tuple(
            members[r].heal_addresses[group_rank] if group_rank < len(members[r].heal_addresses) else "" for r in able
        )
        if plan.replica_rank not in able or len(able) < 2 or not all(addresses):
            return None
        return cls(addresses, able.index(plan.replica_rank), plan.quorum_id)


class Division:
    """Work that is divided. This member does part `part` of `parts`; with more members than parts, some do the same."""

    def __init__(self, work: SharedWork, owners: Owners | None, pieces: int, at: Position, identity: str) -> None:
        self._work = work
        self.owners = owners
        self._at = at
        self._identity = identity
        self.parts = 1 if owners is None else max(1, min(len(owners.addresses), pieces))
        self.part = 0 if owners is None else owners.mine % self.parts

    def __repr__(self) -> str:
        return f"Division(part {self.part} of {self.parts}, {self._at})"

    def of(self, pieces: int) -> Division:
        """The same for a part of the work that is cut into `pieces` only."""
        return Division(self._work, self.owners, pieces, self._at, self._identity)

    def key(self, name: str) -> str:
        """Of a result of this division."""
        return question(self._at, self._identity, name)

    def exchange(
        self, name: str, own: object, took_s: float, *, among: Collection[int] | None = None,
        lost: Collection[int] = (), more: bool = False,
    ) -> dict[int, Any]:  # fmt: skip
        """Publish this member's part, and wait for the others'. On all ranks of a group, in the same order.

        Args:
            name: of the result, unlike the division's others; without a slash.
            own: what came of this member's part: what a state dict may hold (tensors, numbers, text, containers). If
                something in it cannot be sent, that is logged, and each member does this part by itself.
            took_s: seconds that it took.
            among: the parts that are asked for; None: all others'.
            lost: those whose part was missing once: they are not asked, and nobody stays for them.
            more: another result follows at once, to each of the others, so this member need not stay until they have
                fetched this one. A member that stays away from then on is one that the others may find gone.

        Returns:
            the others' parts, by number. Those that are missing have to be done here.
        """
        if self.owners is None or self.parts == 1:
            return {}
        others = [part for part in range(self.parts) if part != self.part and part not in lost]
        wanted = [part for part in others if among is None or part in among]
        found = self._work.exchange(self.owners, self, name, own, took_s, wanted)
        if self.owners.mine < self.parts and not more:
            # Members without a part of their own want this one, too, and publish nothing that would tell of them.
            alike = [m for m in range(self.parts, len(self.owners.addresses)) if m % self.parts != self.part]
            missing = set(wanted) - set(found)
            self._work.stay(self.owners, self.key(name), [m for m in [*others, *alike] if m not in missing], took_s)
        return found


class SharedWork:
    """Divides work among the members of one Manager's quorum.

    Args:
        manager: its state must travel over HTTPTransport; with any other each member does all the work itself.
        agree: given numbers of this rank, the least and the greatest of each among the ranks of its group; None: the
            group has one rank. Called on the training thread, on all ranks alike.
    """

    def __init__(
        self, manager: Manager, agree: Callable[[Sequence[int]], tuple[list[int], list[int]]] | None = None
    ) -> None:
        self._manager = manager
        self._agree = agree or (lambda numbers: (list(numbers), list(numbers)))
        self._board = Board(self._place)
        self._serves = False
        self._told: set[str] = set()
        self._pause = threading.Event()
        """Never set: what is waited on between two rounds of questions."""

    def __repr__(self) -> str:
        return f"SharedWork({self._board!r})"

    def serve(self) -> None:
        """From now on the others can ask. Before the first division."""
        self._serves = self._manager._runtime.shell.transfer.serve_parts(PREFIX, self._board.answer)
        if not self._serves:
            log.warning("work is not shared: the Manager's checkpoint_transport is not an HTTPTransport")

    def divide(self, what: str, pieces: int, sizes: Sequence[int] = ()) -> Division:
        """Begin a division. On the training thread, between two steps, on all ranks of a group.

        Args:
            what: names the work, its size and its order: members that mean something else do not share it.
            pieces: into how many it can be cut; of more members than that some do the same part.
            sizes: of what `Division.of` will be called for. If the group's ranks disagree about one, nothing is shared:
                they would not go through the same exchanges.
        """
        rank = self._manager._runtime.rank
        with self._manager._runtime.shell.lock:
            plan = rank.plan
        owners = Owners.of(plan, rank.settings.group_rank) if self._serves else None
        least, most = self._agree([0 if owners is None else owners.quorum_id, pieces, *sizes])
        if least != most:
            owners = None
        digest = hashlib.blake2b(f"{pieces} {what}".encode(), digest_size=12).hexdigest()
        identity = identity_of(0 if owners is None else owners.quorum_id, digest)
        return Division(self, owners, pieces, self._board.begin(identity), identity)

    def exchange(
        self, owners: Owners, division: Division, name: str, own: object, took_s: float, wanted: Sequence[int]
    ) -> dict[int, Any]:
        """See `Division.exchange`."""
        key, packed = division.key(name), self._packed(own)
        self._board.want(key, wanted)
        if owners.mine < division.parts:
            self._board.publish(key, packed)
        like = None if packed is None else own
        found = self._collect(owners, division, wanted, key, like, self._limit_s(took_s))
        _, missing = self._agree([int(part not in found) for part in wanted])
        return {part: found[part] for part, lost in zip(wanted, missing, strict=True) if not lost}

    def _limit_s(self, took_s: float) -> float:
        """How long a living member is waited for."""
        return max(self._manager._runtime.shell.limits.patience_s, took_s)

    def _packed(self, own: object) -> bytes | None:
        try:
            packed = pack(own)
        except EncodingError as error:
            self._tell(f"each replica does all of this work itself, because its result cannot be sent: {error}")
            return None
        if len(packed) <= RESULT_BYTES_MAX:
            return packed
        self._tell(f"each replica does all of this work itself: a result of {len(packed) >> 20} MB is too much to send")
        return None

    def _collect(
        self, owners: Owners, division: Division, wanted: Sequence[int], key: str, like: object, limit_s: float
    ) -> dict[int, Any]:
        found: dict[int, Any] = {}
        left = list(wanted)
        began = time.monotonic()
        spoke = dict.fromkeys(left, began)
        pause_s, longest_s = PAUSE_S
        while left:
            for part in list(left):
                heard, result = self._ask(owners.addresses[part], f"{key}/{owners.mine}", like)
                now = time.monotonic()
                if heard is not Heard.SILENT:
                    spoke[part] = now
                move, reason = decide(
                    heard, silent_s=now - spoke[part], waited_s=now - began, limit_s=limit_s,
                    broken=self._manager._runtime.rank.broken,
                )  # fmt: skip
                if move is Move.TAKE:
                    found[part] = result
                elif move is Move.REPEAT:
                    self._tell(f"part {part + 1} of {division.parts} of shared work is done here as well: {reason}")
                if move is not Move.WAIT:
                    left.remove(part)
                    self._board.decided(key, part)
            if left:
                self._pause.wait(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        return found

    def _ask(self, address: str, name: str, like: object) -> tuple[Heard, Any]:
        try:
            body = self._manager._runtime.shell.transfer.get_part(address, PREFIX + name, ASK_S, RESULT_BYTES_MAX + 1)
            if body is None:
                return Heard.NEVER, None
        except HealError as error:
            return Heard.REFUSED if isinstance(error.__cause__, ConnectionRefusedError) else Heard.SILENT, None
        try:
            heard = Heard(body[:1])
            return heard, unpack(body[1:], like) if heard is Heard.THERE else None
        except (ValueError, HealError) as error:  # asked again, it would be no better
            log.debug("a part from %s cannot be read: %s", address, error)
            return Heard.NEVER, None

    def stay(self, owners: Owners, key: str, others: Sequence[int], took_s: float) -> None:
        """Until none of these members wants this one's part any more: it may be about to end."""
        began, limit_s = time.monotonic(), self._limit_s(took_s)
        spoke = dict.fromkeys(others, began)
        pause_s, longest_s = PAUSE_S
        while True:
            for other in list(spoke):
                heard, _ = self._ask(owners.addresses[other], f"{key}/{owners.mine}?", None)
                now = time.monotonic()
                if heard is not Heard.SILENT:
                    spoke[other] = now
                if not stays(
                    heard, silent_s=now - spoke[other], waited_s=now - began, limit_s=limit_s,
                    broken=self._manager._runtime.rank.broken,
                ):  # fmt: skip
                    del spoke[other]
            if not spoke:
                return
            self._pause.wait(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _place(self) -> Place:
        runtime, rank = self._manager._runtime, self._manager._runtime.rank
        with runtime.shell.lock:
            is_open = runtime.steps.is_open
            launched = is_open and rank.phase in (Phase.REDUCING, Phase.COUNTED)
            broken = rank.quorum_id if rank.broken else 0
            return Place(rank.held.version.step, is_open, broken, runtime.shell.awaited, launched)

    def _tell(self, text: str) -> None:
        """Once each."""
        if text not in self._told:
            self._told.add(text)
            log.warning("%s: %s", self._manager.replica_id, text)
