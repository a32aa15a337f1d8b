"""`RankRuntime`: everything that one rank runs, put together. What `Manager` is a face of.

The parts, from below: `shell` (the machine, its lock, network and threads), `views` (the state, to give and to take),
`steps` (the training thread's part of a step), and on top of it `collectives`, `warm_up`, `uneven` and `leaving`.

Threads: the training thread, but for `drain`.
"""

from __future__ import annotations

import atexit
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from ft_core.errors import ConfigError, UsageError
from ft_core.process_group import ByDevice, ProcessGroup
from ft_core.protocol.rank.departure import DrainedError
from ft_core.runtime import drain_signal, exit_message, identity, startup
from ft_core.runtime.collectives import Collectives
from ft_core.runtime.hooks import Hooks
from ft_core.runtime.leaving import Leaving
from ft_core.runtime.parity_check import ParityCheck
from ft_core.runtime.participation import Participation
from ft_core.runtime.rank_metrics import open_metrics
from ft_core.runtime.state_views import StateViews
from ft_core.runtime.steps import Steps
from ft_core.runtime.uneven_end import UnevenEnd
from ft_core.runtime.warm_up import WarmUp
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from ft_core.checkpointing import CheckpointTransport
    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.rank import Rank
    from ft_core.reduction.interface import GradientReducer
    from ft_core.runtime.config import Config
    from ft_core.runtime.user_state import LiveState


class RankRuntime:
    """The parts of one rank. `start` opens threads and sockets."""

    def __init__(
        self, config: Config, pg: ProcessGroup | ByDevice | None, transport: CheckpointTransport[Any] | None,
        live: LiveState,
    ) -> None:  # fmt: skip
        pg = ByDevice() if pg is None else pg
        if not isinstance(pg, ProcessGroup | ByDevice):
            raise ConfigError(f"pg must be an ft_core.process_group.ProcessGroup, got {type(pg).__name__}")
        if isinstance(pg, ByDevice):
            pg.check_build()
        started = startup.start(config, pg, transport)
        self.config = config
        self.live = live
        self.shell = shell = started.shell
        self.rank = shell.rank
        self.reducers: list[GradientReducer] = []
        self.views = StateViews(shell, live, self.reducers, config.budget.timeout_s)
        parity = ParityCheck(config.parity_check_every, config.parity_sample_steps)
        self.steps = Steps(
            config, shell, self.views, self.reducers, parity,
            store_address=started.store_address, use_async_quorum=config.use_async_quorum,
        )  # fmt: skip
        self.collectives = Collectives(self.steps)
        self.warm_up = WarmUp(self.steps, wanted=config.warm_up)
        self.uneven = UnevenEnd(self.steps, self.start_quorum, self.should_commit)
        self.leaving = Leaving(self.steps)
        self.hooks = Hooks(self.steps, self.uneven)
        self.participation = Participation(self.rank, self.wait_quorum, self.pinned)
        self._store: Any = started.store
        """The group's; if it is this replica's own, its server ends with it."""
        self._incarnation = started.incarnation
        shell.hello, shell.place = self._hello, self._place
        shell.kill = lambda _reason: drain_signal.kill(told_first=config.world_size > 1)

    def __repr__(self) -> str:
        return f"RankRuntime({self.rank!r}, {self.leaving!r})"

    def start(self) -> None:
        """Connect to the lighthouse. Raises LighthouseError, or what it refused this replica with."""
        shell, settings = self.shell, self.rank.settings
        exit_message.install()
        metrics = open_metrics(self.config, lambda: shell.control.last_ack)
        shell.events.open(self.config.events, self.config.name, metrics)
        shell.limits.start()
        shell.worker.start()
        try:
            shell.control.start()
            shell.control.wait_connected(self.config.budget.connect_s)  # and with it, whom to prefetch from
        except BaseException:
            self.shutdown(wait=False)
            raise
        if settings.exits_on_drain:
            drain_signal.on_sigterm(shell)
        atexit.register(drain_signal.at_exit, weakref.ref(self))

    def exit(self, within_s: float) -> None:
        """Shut down because the interpreter ends: no peer is waited for longer than that."""
        self.shell.limits.patience_s = min(within_s, self.shell.limits.patience_s)
        self.shutdown(wait=True)

    def shutdown(self, *, wait: bool) -> None:
        """As `Manager.shutdown`."""
        self.leaving.shutdown(wait=wait)
        self._store = None

    # ------------------------------------------------------------ steps

    def start_quorum(
        self,
        room_id: str = DEFAULT_ROOM,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """As `Manager.start_quorum`."""
        death, steps = self.shell.death, self.steps
        if death.holder != get_ident():
            death.hold()  # of the thread that trains
        room = self.config.room if room_id == DEFAULT_ROOM else room_id
        if steps.divided or self.warm_up.begin(own_room=room == self.config.room):
            return
        if self.leaving.shut_down:
            raise UsageError("start_quorum after shutdown")
        try:
            steps.open(room, allow_heal, shrink_only, timeout)
        except DrainedError:
            self._end_drained()
        steps.opened()

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """As `Manager.should_commit`."""
        if self.warm_up.under_way:
            self.warm_up.undo()
            return False
        try:
            return self.steps.conclude(timeout)
        finally:
            self.steps.tell_data(committed=False)  # unless it has been told

    def wait_quorum(self) -> None:
        """As `Manager.wait_quorum`."""
        if not self.warm_up.under_way:
            self.steps.wait_quorum()

    @property
    def step_open(self) -> bool:
        """start_quorum was called, and should_commit not yet."""
        return not self.warm_up.undone if self.warm_up.under_way else self.steps.is_open

    def pinned(self) -> Rank:
        """The machine, for whoever tells the script who takes part: the attempt stays in its quorum (R19)."""
        with self.shell.lock:
            self.rank.pin()
        return self.rank

    def run_out(self, apply: Callable[[], object] | None) -> None:
        """As `Manager.run_out`."""
        if self.config.on_exhausted == "leave":
            self.leaving.leave("out of data", finished=False)
        else:
            self.uneven.run_out(apply, ends=self.config.on_exhausted == "stop_all")

    def require_whole_steps(self) -> None:
        """As `Manager.require_all_contributions`."""
        if self.rank.wish is not None:
            raise UsageError("require_all_contributions after the first start_quorum: call it before")
        self.rank.require_whole_steps()

    def _end_drained(self) -> NoReturn:
        self.leaving.end_drained()

    # ------------------------------------------------------------ how it presents itself

    def _hello(self) -> Hello:
        with self.shell.lock:
            address, lines = self.shell.transfer.address, self.steps.describe()[1]
            return identity.hello(self.config, self.rank, self._incarnation, address, lines)

    def _place(self, plan: Plan) -> tuple[str, bool]:
        prefix = f"{plan.store_address}/{self.steps.room}/{plan.quorum_id:x}/{self.config.rank}"
        return prefix, self.steps.rides
