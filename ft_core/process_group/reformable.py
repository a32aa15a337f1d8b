"""`ReformableGroup`: the life cycle that all kinds of groups have in common: formed, aborted, formed again.

How it works: it holds one `Incarnation` (one formed group) at a time. `configure` makes a new one and ends the old one;
`abort` ends the current one. A kind of group says how an incarnation is made (`_incarnate`), who frees one that is over
(`_retire`), and launches collectives on it (`_launch`).

Invariants: the newest `configure`, `abort` or `shutdown` wins: an earlier configure that is still forming fails as soon
as a later call comes, so its thread can simply be given up. After an abort every collective raises until a new
configure. Errors of an earlier incarnation never show in a later one.

Threads: collectives from one thread at a time; everything else from any. `_lock` guards which incarnation is current.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

from ft_core.errors import CollectiveError, ConfigError, UsageError
from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.spec import Spec
from ft_core.process_group.store_pool import parse_store_addr

DEFAULT_TIMEOUT = timedelta(seconds=60)


class Incarnation(Protocol):
    """One formed group, from its forming to its end."""

    spec: Spec

    @property
    def is_forming(self) -> bool:
        """Whether it is neither formed nor over."""

    def form(self) -> None:
        """Form it; raises ConfigError or PeerError, also if `abort` comes first. Bounded by the timeout."""

    def abort(self, reason: Exception) -> None:
        """End it: pending works fail, `form` raises. Idempotent, and the first reason stays."""

    def first_error(self) -> Exception | None:
        """Return the first error so far, one that nobody waited for too; never blocks."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long collectives launched from now on may take."""


class ReformableGroup(ProcessGroup):
    """Base of the groups that carry collectives. `timeout`: of forming, and of each collective.

    A kind of group has incarnations of a type of its own, and names it where it says Any here. (A generic class would
    do so in one place, but then a list of groups of two kinds would be one of `object`.)
    """

    what = ""
    """The library, as it is called in messages."""
    _unconfigured = "unconfigured"

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        _check_timeout(timeout)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._incarnation: Incarnation | None = None
        self._is_shut_down = False

    def __repr__(self) -> str:
        name, incarnation = type(self).__name__, self._incarnation
        if self._is_shut_down:
            return f"{name}(shut down)"
        if incarnation is None:
            return f"{name}({self._unconfigured})"
        return f"{name}({incarnation.spec.place}, {self._state_of(incarnation)})"

    def __del__(self) -> None:
        incarnation = getattr(self, "_incarnation", None)
        if incarnation is not None:
            self._retire(incarnation)

    # ---------------------------------------------------------------------------------------- what a kind implements

    def _incarnate(self, spec: Spec, before: Any) -> Incarnation:
        """Return what is going to be formed from `spec`, in place of `before`. Neither blocks nor starts anything."""
        raise NotImplementedError

    def _retire(self, incarnation: Any) -> None:
        """Have what is over freed. Only hands it over: a finalizer calls this, in the middle of anything."""
        raise NotImplementedError

    def _state_of(self, incarnation: Any) -> str:
        """Return its state, for repr."""
        raise NotImplementedError

    def _shut(self, last: Any) -> None:
        """Free what is left when it is shut down; `last`, if it had one, has been ended."""

    # ------------------------------------------------------------------------------------------------ the life cycle

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:
        """Form a new group; see the base class. With one rank no store is contacted."""
        spec = Spec(
            what=self.what,
            store_addr=store_addr,
            replica_id=replica_id,
            rank=rank,
            world_size=world_size,
            timeout=self._timeout,
        )
        spec.check()
        if world_size > 1:
            parse_store_addr(store_addr)
        with self._lock:
            if self._is_shut_down:
                raise UsageError(f"configure() after shutdown(): make a new {type(self).__name__}")
            old = self._incarnation
            new = self._incarnation = self._incarnate(spec, old)
            self._update_registration(world_size)
        if old is not None:
            self._end(old, "configure() was called again")
        new.form()

    def abort(self) -> None:
        """End the current group (milliseconds); without one, nothing happens."""
        incarnation = self._incarnation
        if incarnation is not None:
            incarnation.abort(CollectiveError(f"abort() was called on {incarnation.spec}; configure() it again"))

    def shutdown(self) -> None:
        """End it for good; freeing the group goes on in the background."""
        self.unregister()
        with self._lock:
            self._is_shut_down = True
            old, self._incarnation = self._incarnation, None
        if old is not None:
            self._end(old, "shutdown() was called")
        self._shut(old)

    def _end(self, incarnation: Incarnation, why: str) -> None:
        incarnation.abort(CollectiveError(f"{incarnation.spec} has ended: {why}"))
        self._retire(incarnation)

    # --------------------------------------------------------------------------------------------------- the group now

    def errored(self) -> Exception | None:
        """Return the first error of the current group, found by waiting or not; never blocks."""
        incarnation = self._incarnation
        return None if incarnation is None else incarnation.first_error()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the next configure and of collectives launched from now on."""
        _check_timeout(timeout)
        self._timeout = timeout
        incarnation = self._incarnation
        if incarnation is not None:
            incarnation.set_timeout(timeout)

    def size(self) -> int:
        """Return the number of ranks; 0 while unconfigured."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.spec.world_size

    def rank(self) -> int:
        """Return this rank; 0 while unconfigured."""
        incarnation = self._incarnation
        return 0 if incarnation is None else incarnation.spec.rank

    def _current(self) -> Any:
        """Return the incarnation to launch a collective on; UsageError before there is one."""
        incarnation = self._incarnation
        if incarnation is None:
            raise UsageError(f"{self!r}: configure() it first")
        if incarnation.is_forming:
            raise UsageError(f"{self!r}: configure() has not returned yet")
        return incarnation


def _check_timeout(timeout: timedelta) -> None:
    if timeout <= timedelta(0):
        raise ConfigError(f"timeout={timeout}: expected more than zero")
