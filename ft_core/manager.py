"""`Manager`: drives one rank's training steps through quorum -> gradients -> commit. The public API of ft_core.

This file documents and delegates: `runtime.RankRuntime` does it, `protocol.rank.Rank` decides. `start_quorum` opens an
attempt at a step. In the steady state that sends nothing: the quorum is leased. Gradients are reduced by a registered
reducer (`ddp.DistributedDataParallel`) or by `allreduce`; the ballot of each member rides in the last all-reduce.
`should_commit` reads the verdict, loads state that was received meanwhile, and says whether to step the optimizer.

Thread map
    training thread    everything public here; user state functions run only on it
    ft-lease-*         control link: hands the machine what the lighthouse sends (runtime.shell)
    ft-quorum-*        quorum worker: builds process groups, receives state, keeps the machine's timer
    ft-watchdog-*      ends collectives that waited too long (runtime.collective_limits)
    ft-heal-*          serve state to healing peers (checkpointing.http.server)
    autograd threads   reducers' hooks: StepAttempt.ready / launch / launch_fence / fence_arrived
Everything they share is in `runtime.shell.RankShell` under one lock. Several Managers may live in one process.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import ReduceOp

from ft_core.errors import ConfigError
from ft_core.protocol.rank.heal_plan import WorldSizeMode
from ft_core.runtime.config import Arguments, resolve
from ft_core.runtime.runtime import RankRuntime
from ft_core.runtime.startup import kind_of
from ft_core.runtime.user_state import DEFAULT_KEY, LiveState
from ft_core.settings import DEFAULT_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch
    from torch.futures import Future

    from ft_core.checkpointing import CheckpointTransport
    from ft_core.process_group import ByDevice, ProcessGroup
    from ft_core.runtime.hooks import Hooks
    from ft_core.runtime.managed_work import ManagedWork

__all__ = ["Manager", "WorldSizeMode"]

T = TypeVar("T")


class Manager:
    """Drives fault-tolerant training on one rank. Constructs and starts; call `shutdown` (or leave it to exit).

    Args:
        pg: unconfigured group for the collectives between replicas; None: by the model's device, or FT_BACKEND.
        load_state_dict: called on a healing replica with what `state_dict` returned on a donor; None: register later.
        state_dict: returns all state that must be equal on all replicas; served from memory until `optimizer.step`.
        min_replica_size: groups in the smallest quorum; under FIXED_WITH_SPARES exactly this many participate.
        use_async_quorum: form quorums during forward; who fell behind heals in a step to which it contributes zeros.
            False: `start_quorum` blocks, and a healed replica contributes at once.
        timeout: the one time budget everything else is derived from (`settings.TimeBudget`).
        quorum_timeout, connect_timeout: defaults 60 s, or TORCHFT_*_TIMEOUT_SEC.
        rank, world_size: inside the replica group; default RANK and WORLD_SIZE, else 0 and 1.
        world_size_mode: DYNAMIC or FIXED_WITH_SPARES; the same on all replicas.
        store_addr, store_port: the group's c10d store; default MASTER_ADDR, MASTER_PORT; else, with one rank, its own.
        lighthouse_addr: host:port or http://host:port, or two with a comma between; default FT_LIGHTHOUSE.
        replica_id: stable name of this group; a fresh suffix is added at every start. Default FT_REPLICA_ID.
        port: where group rank 0 of a group of several ranks listens for the others; 0: any.
        hostname: by which others reach this machine; default FT_HOSTNAME, FT_INTERFACE, else as the lighthouse does.
        heartbeat_interval: accepted and unused: liveness is the lease's business.
        checkpoint_transport: the caller's own way to move state to healing replicas; default: by `transport`.
        init_sync: at step 0 everybody takes the state of one group.
        max_retries: more vetoed attempts in a row raise RuntimeError from should_commit; None: never.
        quorum_retries: how often a timed-out quorum is asked for again before the error is raised.
        parity_check_every: compare digests of the state every so many commits; 0: never. Costs one pass over the state.
        parity_sample_steps: within so many commits each parameter is compared once, a few at each step; 0: never.
        time_overrides: single fields of the time budget by name, for example {"liveness_s": 1.0}.
        expected_replicas, token: groups of the job (default FT_NUM_REPLICA_GROUPS), and its secret (FT_TOKEN).
        exit_on_drain: after SIGTERM or a drain order start_quorum leaves, SystemExit(0). False: see `drain_reason`.
        on_exhausted: what `run_out` does when this replica has no data left: "shadow", "leave" or "stop_all".
        warm_up: who comes while others train makes its first step alone, uncommitted (`ft_core.runtime.warm_up`).
        transport: "http", "pg" or "auto" (docs/state-transport.md), the same on all; default FT_TRANSPORT, else "auto".
        from_scratch: whether to begin at step 0 if all state of the job is lost (R21); None: FT_FROM_SCRATCH, else no.
        room_id: this Manager's quorum namespace at the lighthouse; one that finished training is closed for latecomers.
        fence: where ballots travel, alike on all: "bucket" (default) or "cpu" (docs/device-commit.md); else FT_FENCE.

    Raises:
        ConfigError: an argument or environment variable cannot work; names it, the value and what to do.
        LighthouseError: the lighthouse cannot be reached within `connect_timeout`, or refused this replica.
    """

    def __init__(
        self,
        pg: ProcessGroup | ByDevice | None = None,
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
        fence: str | None = None,
        transport: str | None = None,
    ) -> None:
        del heartbeat_interval
        config = resolve(
            Arguments(
                min_replica_size=min_replica_size, timeout=timeout, quorum_timeout=quorum_timeout, room_id=room_id,
                connect_timeout=connect_timeout, rank=rank, world_size=world_size, world_size_mode=world_size_mode,
                store_addr=store_addr, store_port=store_port, lighthouse_addr=lighthouse_addr, replica_id=replica_id,
                port=port, hostname=hostname, init_sync=init_sync, max_retries=max_retries, from_scratch=from_scratch,
                quorum_retries=quorum_retries, parity_check_every=parity_check_every, time_overrides=time_overrides,
                expected_replicas=expected_replicas, token=token, exit_on_drain=exit_on_drain,
                on_exhausted=on_exhausted, parity_sample_steps=parity_sample_steps, warm_up=warm_up, fence=fence,
                use_async_quorum=use_async_quorum, transport=transport, own_transport=kind_of(checkpoint_transport),
            ),
            os.environ,
        )  # fmt: skip
        self._runtime = RankRuntime(config, pg, checkpoint_transport, LiveState.of(load_state_dict, state_dict))
        self._runtime.start()

    @property
    def hooks(self) -> Hooks:
        """What the library's own wrappers, samplers and front ends need; a training script does not."""
        return self._runtime.hooks

    def __repr__(self) -> str:
        return f"Manager({self.replica_id}, {self._runtime.rank!r}, reducers={len(self._runtime.reducers)})"

    # ------------------------------------------------------------ steps

    def start_quorum(
        self,
        room_id: str = DEFAULT_ROOM,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Open the next attempt; call before forward. Returns at once while the quorum in force is still good.

        The first one of a newcomer may open a warm-up, which belongs to no quorum (`warming_up`).

        Args:
            room_id: independent quorum namespace, by default this Manager's own; changing it leaves the present one.
            allow_heal: False: members that are behind wait instead of healing. Alike on all replicas.
            shrink_only: the next quorum takes nobody in.
            timeout: bound on forming a quorum, default quorum_timeout.

        Raises:
            QuorumTimeoutError: no quorum in time (only here if quorums are synchronous, or on the first call).
            RefusedError, JobFinishedError: the lighthouse does not want this replica.
            SystemExit: (0) this replica was asked to drain and has left (`exit_on_drain`).
        """
        self._runtime.start_quorum(room_id, allow_heal, shrink_only, timeout)

    def wait_quorum(self) -> None:
        """Block until the process groups of this attempt are usable. Raises what kept them from becoming so.

        Returns at once in a warm-up, which has none.
        """
        self._runtime.wait_quorum()

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the attempt. True: every member applies it, step the optimizer now. False: skip the step.

        A committed step is undone only if all who saw its fence complete are lost before the next one completes, while
        a member that did not see it goes on. `Manager.stable_step` tells which step is held by every member.
        Call on every rank, after backward and before anything changes parameters. State received from a peer is loaded
        here, before it returns. False without asking anybody in a newcomer's warm-up (`warming_up`).

        Args:
            timeout: how long all that has to be agreed may take: what was launched and not waited for, the fence, the
                votes of the group's ranks. Default: the Manager's.

        Raises:
            UsageError: start_quorum was not called.
            QuorumTimeoutError, RefusedError, JobFinishedError: no quorum could be had.
            RuntimeError: more than max_retries attempts in a row were not committed.
        """
        return self._runtime.should_commit(timeout)

    @property
    def quorum_lost(self) -> bool:
        """The last should_commit found the quorum broken; start_quorum forms another. The same on a group's ranks."""
        return self._runtime.steps.quorum_lost

    @property
    def warming_up(self) -> bool:
        """This is a newcomer's first step, outside the quorum: nothing is committed until the next start_quorum."""
        return self._runtime.warm_up.under_way

    @property
    def step_open(self) -> bool:
        """start_quorum was called, and should_commit not yet."""
        return self._runtime.step_open

    def require_all_contributions(self) -> None:
        """From the first step on: a step commits only if the share of every planned participant is in it.

        Otherwise everybody skips the step. On all replica groups or on none: compared before a quorum is formed. One
        whose heal failed costs the others a step, and is not counted on before it is healed: a bad member cannot hold
        the others (R11). So a step is whole with respect to its participants, who change with the membership.

        Raises:
            UsageError: after the first start_quorum.
        """
        self._runtime.require_whole_steps()

    def pause(self, reason: str, max_s: float) -> AbstractContextManager[None]:
        """Announce that this replica is busy for at most `max_s` seconds (saving, validation, compiling).

        Peers wait for it; only the end of its life ends the wait.

        Raises:
            ConfigError: `max_s` is not a positive number.
        """
        return self._runtime.shell.busy(reason, max_s)

    # ------------------------------------------------------------ what a script reduces and reports

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> ManagedWork:
        """Reduce `tensor` in place over the participants of the quorum; AVG divides by their number.

        Errors are recorded and veto the step, never raised; after one the tensor's content is undefined. Members
        that do not participate (healing, spare, out of data, soft failure) contribute the operation's neutral element
        (0 to a sum, -inf to a maximum), and get the result, too. AVG is weighted (`set_batch_weight`), the other
        operations are not. All replicas must make the same calls in the same order. `should_commit` waits for those
        that are still under way; one that failed breaks the attempt.

        Returns:
            A Work; `wait()` returns the tensor when it is ready, `get_future()` resolves to it. In a backward pass it
            is a `torch.futures.Future` as well, so that a communication hook of torch's DDP may return it.

        Raises:
            ConfigError: an operation (AVG of integers, MAX of complex numbers) or a dtype (int16, float8) that is not
                supported; a tensor that is not contiguous, or where no group carries it; quantization.
        """
        if should_quantize:
            raise ConfigError("should_quantize=True needs quantized collectives, which are not in this version")
        return self._runtime.collectives.allreduce(tensor, reduce_op)

    def wrap_future(self, fut: Future[T], default: T, timeout: timedelta | None = None) -> Future[T]:
        """Return a future that never fails: an error, or `timeout`, is reported and `default` is its value.

        `should_commit` waits until it is done, so a step commits only without such an error.
        """
        return self._runtime.collectives.wrap_future(fut, default, timeout)

    def report_error(self, e: Exception) -> None:
        """Record an error that leaves the process group usable: zeros are contributed and everybody skips the step."""
        self._runtime.shell.report(e)

    def errored(self) -> Exception | None:
        """What went wrong in this attempt, or None."""
        return self._runtime.rank.error or self._runtime.rank.failure

    def set_batch_weight(self, weight: int) -> None:
        """Samples (or tokens) in the micro-batch whose forward comes next; its loss is the mean over them.

        Call it once per micro-batch, or never, between `start_quorum` and the forward; the weights of a step add up.
        Committed is then the gradient of the mean over all samples of all replicas. A replica that sets no weight
        counts as 1. In a group of several ranks a weight counts on its rank's ring; with FSDP2 all set the same.

        Raises:
            ConfigError: it is not an integer from 0 on, or the step's sum is more than 2**32 - 1.
            UsageError: `allreduce` averaged something in this step, which was weighted with the sum so far; or a
                backward of this step was reduced in which this replica's weight was 0; or an elastic loader is
                attached, which weighs its micro-batches itself. In the vote: the ranks of a sharded model differ.
        """
        self._runtime.steps.weigh_batch(weight)

    # ------------------------------------------------------------ who takes part

    @property
    def replica_id(self) -> str:
        """Name plus the suffix of this start."""
        return self._runtime.rank.settings.replica_id

    def current_step(self) -> int:
        """Number of the step being worked on: how many were committed on this replica's lineage."""
        return self._runtime.participation.step

    def batches_committed(self) -> int:
        """Number of gradients (one per participant and step) in all commits so far."""
        return self._runtime.rank.held.batches_committed

    @property
    def last_commit_weight(self) -> int:
        """Sum of all weights (`set_batch_weight`; 1 without) in the commit that made the state this replica holds.

        That is what its gradients were divided by. Equal states have equal ones, on all members: a replica that was
        healed has been told the donor's. 0 before the first commit, and after a checkpoint was loaded until the next.
        In a group of several ranks, each of which has a ring, it is that of rank 0's ring, on all ranks.
        """
        return self._runtime.rank.held.commit_weight

    def stable_step(self) -> int:
        """Newest step known to be held by every member of the quorum; -1 before the first fence.

        It is not made again while a holder lives that was not away for orphan_s (R2): rename checkpoints of it (R6).
        """
        return self._runtime.rank.held.stable.step

    def num_participants(self) -> int:
        """Number of members whose gradients count in this attempt; 1 in a warm-up. Waits for the quorum."""
        return self._runtime.participation.count()

    def participating_rank(self) -> int | None:
        """This replica's position among the participants, or None. Waits for the quorum."""
        return self._runtime.participation.place()

    _participating_replica_world_size = property(num_participants)  # an example of the reference implementation
    _participating_replica_rank = property(participating_rank)  # prints them by these names

    def is_participating(self) -> bool:
        """Whether this replica's gradients count in this attempt. Waits for the quorum."""
        return self._runtime.participation.here()

    @property
    def quorum_id(self) -> int:
        """Of the quorum in force; 0 before the first one. The same on all members during an attempt."""
        return self._runtime.participation.quorum_id

    @property
    def members(self) -> tuple[str, ...]:
        """replica_id of each member of the quorum in force, sorted; includes spares and those that heal."""
        return self._runtime.participation.members

    @property
    def healing_members(self) -> tuple[str, ...]:
        """Those of `members` that received the others' state when this quorum began."""
        return self._runtime.participation.healing

    # ------------------------------------------------------------ state

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add a named pair of state functions. Raises ConfigError if the key is taken."""
        self._runtime.live.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        """Deprecated alias: registers under the key 'default'."""
        self._runtime.live.register(DEFAULT_KEY, load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """State may be read again for healing peers."""
        self._runtime.live.allow_read()

    def disallow_state_dict_read(self) -> None:
        """State is about to be half-updated: do not read it until `allow_state_dict_read`."""
        self._runtime.live.disallow_read()

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must hold besides the user's state: step, batches_committed, and the version's identity."""
        return self._runtime.views.progress()

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from a checkpoint. Call before the first start_quorum.

        Raises:
            UsageError: this replica is in a quorum already.
            ConfigError: keys are missing, or a value is none that a Manager saves.
        """
        self._runtime.views.restore(state_dict)

    # ------------------------------------------------------------ out of data, and the end

    @property
    def all_exhausted(self) -> bool:
        """The last should_commit found the data pass over: all are out of it, or one ends it for all."""
        return self._runtime.steps.pass_over

    def run_out(self, apply: Callable[[], object] | None = None) -> None:
        """This replica has no data left in this pass (epoch): do what `on_exhausted` says. Call between two steps.

        "shadow": take part with weight zero until all are out of data. "stop_all": the same for one step, which is the
        last of the pass for all; the others see `all_exhausted` after it, and must end their loop. "leave": leave the
        quorum at once, for good, with the state of the last commit.

        Args:
            apply: called after every commit that others make meanwhile; does what the training loop does after
                should_commit returned True (clipping, optimizer.step, scheduler.step). It keeps this replica equal to
                the others, and able to give its state to those who heal. None: nothing is applied, and before the
                pass ends this replica is healed by the others; should they all be lost, its older state is left.

        Raises:
            QuorumTimeoutError, RefusedError, JobFinishedError: no quorum could be had.
            SystemExit: (0) this replica was asked to drain and has left.
        """
        self._runtime.run_out(apply)

    def request_stop(self) -> None:
        """Ask all members to stop training: in every ballot of this rank from the next one on."""
        self._runtime.leaving.request_stop()

    @property
    def stop_agreed(self) -> bool:
        """Some member asked everybody to stop, and everybody knows it. Changes in should_commit only."""
        return self._runtime.rank.departure.stop_agreed

    @property
    def drain_reason(self) -> str:
        """Why this replica is to end at the next step boundary, or ''. Changes at the same step on all ranks."""
        return self._runtime.leaving.drain_reason

    def leave(self, reason: str = "left", finished: bool = False) -> None:
        """Leave the quorum without costing the others a step: agree in a last fence, then say goodbye (R16).

        Call at a step boundary. In a step that is open (start_quorum, and no should_commit yet) the others lose it if
        the script makes collectives of its own in each step: nobody here makes these calls. `finished`: training is
        over; the lighthouse keeps the room closed for latecomers, so a late restart does not train again over the
        checkpoints.
        """
        self._runtime.leaving.leave(reason, finished=finished)

    def shutdown(self, wait: bool = True) -> None:
        """Leave if that is possible, then stop every thread and close every socket. Idempotent, bounded in time.

        `wait=False`: do not take part in a last fence; peers lose the step in flight, but not one that this replica has
        committed: its connections stay open until they have it, or for EXIT_S.
        """
        self._runtime.shutdown(wait=wait)
