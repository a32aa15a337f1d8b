"""`Manager`: drives one rank's training steps through quorum -> gradients -> commit. The public API of ft_core.

How it works. `start_quorum` opens an attempt at a step. In the steady state that sends nothing: the quorum is leased.
When something changed (a member failed, wants to join or leave) it begins a `quorum_worker.Round`. Gradients are
reduced by a registered carrier (`ddp.DistributedDataParallel`) or by `allreduce`; the fence rides along
(`step_attempt.StepAttempt`). `should_commit` reads the verdict, loads state that was received meanwhile, and tells the
caller whether to step the optimizer. All protocol decisions are `rank.Step`'s; this file wires it to threads, process
groups and user state.

Thread map
    training thread    everything public here; user state functions run only on it
    ft-lease-*         control link: calls Session.on_* (aborts the lanes on a loss, wakes the worker)
    ft-quorum-*        quorum worker: asks, configures, receives state (rounds.QuorumWorker)
    ft-watchdog-*      ends collectives that waited too long (watchdog.Watchdog)
    ft-heal-*          serve state to healing peers (checkpointing.http.server)
    autograd threads   carriers' hooks: StepAttempt.ready / launch / launch_fence / fence_arrived
Everything they share is in `session.Session` under one lock. Several Managers may live in one process.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_core.errors import ConfigError, StateRefusedError, UsageError
from ft_core.process_group import ProcessGroup
from ft_core.protocol.rank import saved_progress
from ft_core.protocol.rank.heal_plan import Plan, WorldSizeMode
from ft_core.protocol.rank.phases import Go, Heal, MustAsk, Phase
from ft_core.protocol.rank.rank import Step
from ft_core.protocol.types import Version
from ft_core.reduction.batch_weights import BatchWeights
from ft_core.runtime import drain_signal, exit_message
from ft_core.runtime import startup as setup
from ft_core.runtime.agreement import Agreement
from ft_core.runtime.collectives import Collectives
from ft_core.runtime.commit import Commit
from ft_core.runtime.data_port import DataPort
from ft_core.runtime.drain_signal import EXIT_S, DrainedError
from ft_core.runtime.exhaustion import Exhaustion
from ft_core.runtime.lease_wait import wait_for_a_lease
from ft_core.runtime.leaving import Leaving
from ft_core.runtime.parity_check import ParityCheck
from ft_core.runtime.quorum_worker import QuorumWorker, Round
from ft_core.runtime.state_views import StateViews
from ft_core.runtime.step_attempt import StepAttempt
from ft_core.runtime.user_state import DEFAULT_KEY, LiveState
from ft_core.runtime.warm_up import WarmUp
from ft_core.runtime.weighted import Weighted
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch._C._distributed_c10d import Store

    from ft_core.checkpointing import CheckpointTransport
    from ft_core.protocol.lighthouse.events import Hello
    from ft_core.reduction.interface import Carrier
    from ft_core.runtime.session import Session
    from ft_core.runtime.state_transfer import Healing

__all__ = ["Manager", "WorldSizeMode"]

log = logging.getLogger("ft_core")


class Manager(DataPort, Collectives, Commit, Agreement, Weighted, Exhaustion, Leaving, StateViews, WarmUp):
    """Drives fault-tolerant training on one rank. Constructs and starts; call `shutdown` (or leave it to exit).

    Args:
        pg: unconfigured fault-tolerant process group for the collectives between replica groups.
        load_state_dict: called on a healing replica with what `state_dict` returned on a donor; None: register later.
        state_dict: returns all state that must be equal on all replicas (model, optimizer, ...). Its tensors are served
            to healing peers from live memory until the next `optimizer.step`.
        min_replica_size: groups in the smallest quorum; under FIXED_WITH_SPARES exactly this many participate.
        use_async_quorum: form quorums during the forward pass; a replica that fell behind then contributes zeros to the
            step in which it heals. False: `start_quorum` blocks, and a healed replica contributes at once.
        timeout: the one time budget everything else is derived from (`settings.TimeBudget`).
        quorum_timeout, connect_timeout: defaults 60 s, or TORCHFT_*_TIMEOUT_SEC.
        rank, world_size: inside the replica group; default RANK and WORLD_SIZE, else 0 and 1.
        world_size_mode: DYNAMIC or FIXED_WITH_SPARES; the same on all replicas.
        store_addr, store_port: c10d store of the group; default MASTER_ADDR and MASTER_PORT; a group of one rank
            without either starts its own.
        lighthouse_addr: host:port or http://host:port; default FT_LIGHTHOUSE.
        replica_id: stable name of this group; a fresh suffix is added at every start. Default FT_REPLICA_ID.
        port: where group rank 0 of a group of several ranks listens for the others; 0: any.
        hostname: what other machines reach this one at; default FT_HOSTNAME, FT_INTERFACE, else the address from
            which packets to the lighthouse leave.
        heartbeat_interval: accepted and unused: liveness is the lease's business.
        checkpoint_transport: how state moves to healing replicas; default `HTTPTransport`.
        init_sync: at step 0 everybody takes the state of one group.
        max_retries: more vetoed attempts in a row raise RuntimeError from should_commit; None: never.
        quorum_retries: how often a timed-out quorum is asked for again before the error is raised.
        parity_check_every: compare digests of the state every so many commits; 0: never. Costs one pass over the state.
        parity_sample_steps: within so many commits each parameter is compared once, a few at each step; 0: never.
        time_overrides: single fields of the time budget by name, for example {"liveness_s": 1.0}.
        expected_replicas: how many groups the job is configured with; default FT_NUM_REPLICA_GROUPS.
        token: the job's secret; default FT_TOKEN.
        exit_on_drain: SIGTERM or an operator's drain order makes the next start_quorum leave in agreement and raise
            SystemExit(0). False: only `drain_reason` is set.
        on_exhausted: what `run_out` does when this replica has no data left: "shadow", "leave" or "stop_all".
        warm_up: a replica that comes while others are training makes its first step outside the quorum, uncommitted,
            so that its compiling and loading holds nobody up (`ft_core.runtime.warm_up` says where it does not).
        from_scratch: whether to begin at step 0 if all state of the job is lost (R21); None: FT_FROM_SCRATCH, else no.
        room_id: this Manager's quorum namespace at the lighthouse; one that finished training is closed for latecomers.

    Raises:
        ConfigError: an argument or environment variable cannot work; names it, the value and what to do.
        LighthouseError: the lighthouse cannot be reached within `connect_timeout`, or refused this replica.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int | None = None,
        use_async_quorum: bool = True,
        timeout: timedelta | None = None,
        quorum_timeout: timedelta | None = None,
        connect_timeout: timedelta | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        checkpoint_transport: CheckpointTransport[Any] | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int | None = None,
        *,
        parity_check_every: int = 0,
        parity_sample_steps: int = 1000,
        time_overrides: Mapping[str, float] | None = None,
        expected_replicas: int | None = None,
        token: str | None = None,
        exit_on_drain: bool = True,
        on_exhausted: str = "shadow",
        warm_up: bool = True,
        room_id: str = DEFAULT_ROOM,
        from_scratch: bool | None = None,
    ) -> None:
        del heartbeat_interval
        self._config = config = setup.resolve(
            setup.Arguments(
                min_replica_size=min_replica_size, timeout=timeout, quorum_timeout=quorum_timeout, room_id=room_id,
                connect_timeout=connect_timeout, rank=rank, world_size=world_size, world_size_mode=world_size_mode,
                store_addr=store_addr, store_port=store_port, lighthouse_addr=lighthouse_addr, replica_id=replica_id,
                port=port, hostname=hostname, init_sync=init_sync, max_retries=max_retries, from_scratch=from_scratch,
                quorum_retries=quorum_retries, parity_check_every=parity_check_every, time_overrides=time_overrides,
                expected_replicas=expected_replicas, token=token, exit_on_drain=exit_on_drain,
                on_exhausted=on_exhausted, parity_sample_steps=parity_sample_steps,
            ),
            os.environ,
        )  # fmt: skip
        if not isinstance(pg, ProcessGroup):
            raise ConfigError(f"pg must be an ft_core.process_group.ProcessGroup, got {type(pg).__name__}")
        if (load_state_dict is None) != (state_dict is None):
            raise ConfigError("pass both load_state_dict and state_dict, or neither and register_state_dict_fn later")
        self._use_async, self._warm_up_wanted = use_async_quorum, warm_up
        self._live = LiveState()
        if load_state_dict is not None and state_dict is not None:
            self._live.register(DEFAULT_KEY, load_state_dict, state_dict)
        self._carriers: list[Carrier] = []
        self._attempt: StepAttempt | None = None
        self._round: Round | None = None
        self._attempts = 0
        self._weights = BatchWeights()
        self._room = config.room
        self._allow_heal = True
        self._shrink_only = False
        self._riding = self._step_open = False
        lineage = secrets.randbits(62) if init_sync else 0
        step = Step(config.step, lineage=lineage, now=time.monotonic())
        started = setup.start(config, pg, checkpoint_transport, step, self._hello)
        self._step = step
        self._session: Session = started.session
        self._healing: Healing = started.healing
        self._store: Store | None = started.store
        self._store_address: str = started.store_address
        self._incarnation = started.incarnation
        self._parity = ParityCheck(config.parity_check_every, config.parity_sample_steps)
        self._worker = QuorumWorker(self._session, self._healing, self._place)
        self._session.cancel_heal = self._healing.cancel
        self._session.kill = lambda _reason: drain_signal.kill(told_first=config.world_size > 1)
        self._session.submit = self._worker.submit
        exit_message.install()
        self._session.watchdog.start()
        self._worker.start()
        try:
            self._session.control.start()
            self._session.control.wait_connected(config.budget.connect_s)  # and with it, whom to prefetch from
        except BaseException:
            self.shutdown(wait=False)
            raise
        if exit_on_drain:
            drain_signal.on_sigterm(self._session)
        atexit.register(drain_signal.at_exit, weakref.ref(self))

    def __repr__(self) -> str:
        return f"Manager({self._step.settings.replica_id}, {self._step!r}, carriers={len(self._carriers)})"

    # ------------------------------------------------------------ state

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add a named pair of state functions. Raises ConfigError if the key is taken."""
        self._live.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """Deprecated alias: registers under the key 'default'."""
        self._live.register(DEFAULT_KEY, load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """State may be read again for healing peers."""
        self._live.allow_read()

    def disallow_state_dict_read(self) -> None:
        """State is about to be half-updated: do not read it until `allow_state_dict_read`."""
        self._live.disallow_read()

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must hold besides the user's state: step, batches_committed, and the version's identity."""
        with self._session.lock:
            step = self._step
            return {
                "step": step.version.step, "batches_committed": step.batches_committed,
                "epoch": step.version.epoch, "lineage": step.lineage,
            }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from a checkpoint. Call before the first start_quorum.

        Raises:
            UsageError: this replica is in a quorum already.
            ConfigError: keys are missing, or a value is none that a Manager saves.
        """
        version, lineage, batches = saved_progress.read(state_dict, self._step.lineage, time.time())
        with self._session.lock:
            if self._step.plan is not None:
                raise UsageError("Manager.load_state_dict after the first start_quorum: load the checkpoint before it")
            self._step.restore(version, lineage, batches)

    def batches_committed(self) -> int:
        """Number of gradients (one per participant and step) in all commits so far."""
        return self._step.batches_committed

    def stable_step(self) -> int:
        """Newest step known to be held by every member of the quorum; -1 before the first fence.

        It is not made again while a holder lives that was not away for orphan_s (R2): rename checkpoints of it (R6).
        """
        return self._step.stable.step

    def report_torn_state(self, error: BaseException) -> None:
        """optimizer.step raised after a commit: this state is neither old nor new and must be healed (R13)."""
        with self._session.lock:
            self._step.tear()
        self._session.fail(error)

    # ------------------------------------------------------------ quorum

    def _start_quorum(self, room_id: str, allow_heal: bool, shrink_only: bool, timeout: timedelta | None) -> None:
        session = self._session
        room_id = self._config.room if room_id == DEFAULT_ROOM else room_id
        if self._shut_down:
            raise UsageError("start_quorum after shutdown")
        if session.fatal is not None:
            raise session.fatal
        self._pin()
        pending, self._step_open = self._round, True
        if pending is not None and self._under_way(pending):
            return
        with session.lock:
            if self._step.phase in (Phase.LAUNCHED, Phase.FENCED):  # should_commit was skipped
                self._reset_weights()
            decision = self._step.boundary() if room_id == self._room else MustAsk(f"changing to room {room_id}", False)
            alike = self._config.world_size == 1 or self._step.departure.drain_agreed or isinstance(decision, MustAsk)
        if session.draining and alike:
            self._end_drained()
        if isinstance(decision, MustAsk) and (decision.failed or room_id != self._room):
            session.lanes.abort()  # the others may be waiting for this rank in a collective
        if self._healing.snapshot_wanted:
            self._healing.offer_live(self._whole_state)
        if isinstance(decision, Go) and self._step.awaits_lease and not self._step.broken:
            wait_for_a_lease(session)
            self._start_quorum(room_id, allow_heal, shrink_only, timeout)
            return
        if isinstance(decision, Go):
            session.error = None
            if self._attempt is None or self._attempt.used:  # else it is the one that should_commit opened
                self._new_attempt()
            if self._step.heal is not Heal.NONE and pending is not None:
                self._settle_in(pending)
            return
        self._room, self._allow_heal, self._shrink_only = room_id, allow_heal, shrink_only
        round_ = self._begin_round(decision, timeout)
        self._new_attempt()
        self._settle_in(round_)

    def _under_way(self, asked: Round) -> bool:
        """Whether the attempt that begins belongs to a round that still runs. Raises why the last one failed."""
        if self._session.draining and not asked.configured.wait(EXIT_S):
            self._end_drained()
        if asked.configured.is_set():
            if not asked.raised and not self._session.draining:
                asked.check()  # its timeout has been waited for, and not been reported
            return False
        self._new_attempt()
        self._settle_in(asked)
        return True

    def wait_quorum(self) -> None:
        """Block until the process group of this attempt is usable. Raises what kept it from becoming so.

        Returns at once in a warm-up, which has none.
        """
        self._pin()
        round_ = self._round
        if self.warming_up:
            return
        if round_ is None:
            raise UsageError("wait_quorum before start_quorum")
        round_.wait_configured()
        if not isinstance(round_.error, DrainedError):
            round_.check()

    def _begin_round(self, why: MustAsk, timeout: timedelta | None, *, hands_over: bool = False) -> Round:
        session, step = self._session, self._step
        if session.works:  # should_commit was skipped
            self._end_works()
        fresh = step.plan is None
        if fresh:
            self._riding = len(self._carriers) == 1
            step.describe(self._describe()[0])
        with session.lock:
            usable = step.version >= Version(0, 0)
            version = step.version
        state = self._view(fresh) if usable else None
        worthless = fresh and version.step <= 0
        round_ = Round(
            why=why,
            template=setup.ask_template(
                self._config, self._healing.address, self._store_address, allow_heal=self._allow_heal,
                shrink_only=self._shrink_only, heals_first=fresh or not self._use_async or version.step <= 0,
                layout=self._describe()[1] if fresh else (),
            ),
            room=self._room,
            timeout_s=(timeout.total_seconds() if timeout is not None else self._config.budget.quorum_s)
            * (1 + self._config.quorum_retries),
            state=state,
            in_place=state() if worthless and state is not None else None,
            prefetch=fresh,
            hands_over=hands_over,
        )  # fmt: skip
        self._round = round_
        self._worker.submit(round_)
        return round_

    def _settle_in(self, round_: Round) -> None:
        """A first or a synchronous quorum: wait for it, and load received state before forward if the plan says so."""
        if not round_.template.heals_before_forward:
            return
        round_.wait_configured()
        if isinstance(round_.error, DrainedError):
            self._end_drained()
        round_.check()
        if round_.plan is not None and round_.plan.heals:  # also late, if its last heal failed
            round_.wait_healed()
            if isinstance(round_.error, StateRefusedError):
                raise round_.error
            self._apply_heal()
        if self._session.draining and self._config.world_size == 1:
            self._end_drained()

    def _new_attempt(self) -> None:
        self._attempts += 1
        assert self._round is not None
        args = self._session, self._round, self._weights, self._carriers
        self._attempt = StepAttempt(self._attempts, *args, rides=self._riding)

    def _place(self, plan: Plan) -> tuple[str, int, int, bool]:
        """Quorum worker: where the lanes of a quorum meet. (store prefix, rank, size, both lanes at once)"""
        prefix = f"{plan.store_address}/{self._room}/{plan.quorum_id:x}/{self._config.rank}"
        return prefix, plan.replica_rank, plan.size, not self._riding

    def _hello(self) -> Hello:
        """Lease thread: what to present."""
        step, config = self._step, self._config
        with self._session.lock:
            return setup.hello(config, step, self._incarnation, self._healing.address, self._describe()[1])

    def _describe(self) -> tuple[int, tuple[str, ...]]:
        return setup.describe(self._config, self._step, self.data_backend, self._carriers, self._data)

    # ------------------------------------------------------------ collectives

    def register_carrier(self, carrier: Carrier) -> None:
        """Called by the DDP wrapper: its last bucket carries the fence.

        Raises:
            UsageError: after the first start_quorum; where the fence rides is fixed by then (R4).
        """
        if self._step.plan is not None or self._round is not None:
            raise UsageError("wrap the model in DistributedDataParallel before the first start_quorum")
        self._carriers.append(carrier)

    def unregister_carrier(self, carrier: Carrier) -> None:
        """Forget a carrier again (before the first start_quorum)."""
        if carrier in self._carriers and self._round is None:
            self._carriers.remove(carrier)

    def current_attempt(self) -> StepAttempt | None:
        """The open attempt, for carriers; None before the first start_quorum."""
        return self._attempt

    @property
    def data_backend(self) -> str:
        """Backend of the data lane, for the DDP wrapper's warning about CUDA tensors."""
        return str(self._session.lanes.main.getBackendName())

    @contextlib.contextmanager
    def pause(self, reason: str, max_s: float) -> Iterator[None]:
        """Announce that this replica is busy for at most `max_s` seconds (saving, validation, compiling).

        Peers wait for it; only the end of its life ends the wait.

        Raises:
            ConfigError: `max_s` is not a positive number.
        """
        if not max_s > 0:
            raise ConfigError(f"pause(max_s={max_s!r}) must be a positive number of seconds")
        with self._session.busy(reason, max_s):
            yield
