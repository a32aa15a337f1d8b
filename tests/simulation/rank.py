"""One rank in the simulation: a training script around the machine that ships, and the shell that performs its actions.

The script is what a user's loop is: start_quorum, forward, backward, should_commit, and what may go wrong in them. It
waits with the predicates that the product's shell waits with (`Rank.forming`, `Rank.receiving`). The shell hands the
machine what happens (`dispatch`), performs its actions by a table on the simulated network, and keeps its one timer.
Nothing of the protocol is decided here. After each event the machine checks all its invariants.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from ft_core.errors import CollectiveError, StateRefusedError
from ft_core.protocol.pauses import Wait
from ft_core.protocol.pushes import Answer, Busy, Change, Lost, Order, Over, Push, Reason
from ft_core.protocol.rank import actions as do
from ft_core.protocol.rank import events as on
from ft_core.protocol.rank.formation import Wish
from ft_core.protocol.rank.phases import Go, Phase
from ft_core.protocol.types import Ask, Outcome, Verdict
from tests.simulation.history import Violation
from tests.simulation.receiving import Receiving
from tests.simulation.samples import Samples
from tests.simulation.user_ops import UserOps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core.protocol.rank.heal_plan import Plan
    from ft_core.protocol.rank.rank import Rank as Machine
    from ft_core.protocol.types import Quorum
    from tests.simulation.group import Group
    from tests.simulation.leader import RankLink
    from tests.simulation.ring import Op, Ring

CONNECT_S = 0.5
"""So long a script waits for the lighthouse at first; the product raises then, this one goes on."""
Gradients = tuple[tuple[int, int], ...]
"""(who gave it, the state it was taken at) each."""


class Rank:
    """One rank's training loop around the machine."""

    def __init__(self, group: Group, index: int, machine: Machine) -> None:
        self.world = group.world
        self.group = group
        self.index = index
        self.machine = machine
        self.name = group.rid if group.world.config.ranks == 1 else f"{group.rid}/{index}"
        self.state = hash((1, group.key, index))
        self.samples = Samples()
        self.batch = 1
        """The batch of its data that its script trains on, or will next."""
        self.met_in = 0
        """The quorum in which that was compared with the others'."""
        self.places = 0
        """Participants of the attempt that was launched last."""
        self.receiving: Receiving = Receiving(self)
        self.ring: Ring | None = None
        self.ops = UserOps(self)
        self.stopped = False
        """SIGSTOP to this rank alone."""
        self.stops = 0
        self.deferred: list[tuple[Group | Rank, Callable[..., None], tuple[Any, ...]]] = []
        self.busy_until = self.back_at = 0.0
        """Until when it has announced to be busy, and when it will really be back; 0: it is not busy."""
        self.token = 0
        self.steps = 0
        """Steps that its script has begun: their collectives inside the group meet those of the others' same step."""
        """Which activity of the script is current: a timer with an older one is void."""
        self.asked_at = 0.0
        self.reducing = False
        """The script waits for the last all-reduce of its attempt."""
        self.polling = False
        """The script waits, with all members, until one of them has a lease again (R3)."""
        self.pending: tuple[Gradients, int, int] | None = None
        """Gradients of a completed all-reduce, their divisor, and the samples in them."""
        self.last_step = 0
        self.was_torn = False
        self._waits: tuple[Callable[[], bool], Callable[[], None]] | None = None
        """What the script waits for, and what it does then."""
        self._tick_at = -1.0

    @property
    def link(self) -> RankLink:
        """Its way to the leader of the group."""
        return self.group.leader.links[self.index]

    def start(self) -> None:
        """The process is up."""
        self.link.open()
        self.link.renew()
        self._begin(self.world.now + CONNECT_S)

    def _begin(self, at_last: float) -> None:
        """The script runs once its Manager is connected, and knows of whom live state can be had."""
        if self.group.welcomed or self.world.now >= at_last:
            self.boundary()
        else:
            self.world.at(0.01, self, self._begin, at_last)

    # ------------------------------------------------------------ the process

    @property
    def alive(self) -> bool:
        """Its process group lives."""
        return self.group.alive

    @property
    def frozen(self) -> bool:
        """It does nothing."""
        return self.stopped or self._frozen_with_group

    @property
    def _frozen_with_group(self) -> bool:
        return self.group.frozen and not (self.group.leader_only and self.index)

    @property
    def quorum_id(self) -> int:
        """The quorum this rank is in; 0: none."""
        return self.machine.quorum_id

    def defer(self, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Do it when this rank is thawed."""
        (self.group if self._frozen_with_group else self).deferred.append((self, fn, args))

    def told(self, fn: Callable[..., None], *args: Any) -> None:
        """The leader sends this rank something, which handles it now, or when it is thawed."""
        if self.frozen:
            self.defer(fn, args)
        else:
            fn(*args)

    def stop(self) -> None:
        """SIGSTOP."""
        world = self.world
        if self.stopped or not self.alive or self.group.done:
            return
        self.stops += 1
        world.say("%s alone is frozen", self.name)
        self.stopped = True
        world.at(world.config.liveness_s, self.group, self._silent, self.stops)

    def _silent(self, stops: int) -> None:
        if stops == self.stops:
            self.link.silent()

    def resume(self) -> None:
        """SIGCONT: its stream to the leader is opened anew, with the ask that is open."""
        if not self.stopped or not self.alive:
            return
        self.world.say("%s is thawed", self.name)
        self.stopped = False
        self.world.trouble_at = self.world.now
        deferred, self.deferred = self.deferred, []
        for position, (owner, fn, args) in enumerate(deferred):
            self.world.at(position * 1e-6, owner, fn, *args)
        stream = self.link.stream
        if stream is not None and not stream.server_open:
            self.world.at(0.02, self, self.link.down, stream)
        self.world.recheck()

    # ------------------------------------------------------------ the shell: events, actions, one timer

    def dispatch(self, event: on.Event) -> None:
        """Hand the machine an event, and perform what follows."""
        if self.group.done:
            return
        before = self.machine.phase
        actions = self.machine.handle(event, self.world.now)
        if self.world.watch is not None:
            self.world.watch(self, event, before, actions)
        self._perform(actions)

    def _perform(self, actions: do.Actions) -> None:
        for action in actions:
            PERFORM[type(action)](self, action)
        self._after()

    def _after(self) -> None:
        """After each event: what must always hold, the timer, and whether the script can go on."""
        machine, world = self.machine, self.world
        try:
            machine.validate()
        except AssertionError as broken:
            raise Violation("rank", f"{self.name}, {machine!r}: {broken}") from broken
        if machine.next_at < float("inf") and (machine.next_at < self._tick_at or self._tick_at <= world.now):
            self._tick_at = max(machine.next_at, world.now)
            world.at(self._tick_at - world.now, self, self._tick, self._tick_at)
        if self.reducing and machine.phase is not Phase.REDUCING:
            self.reducing = False
            if machine.phase is not Phase.COUNTED:  # its all-reduce has failed: on to should_commit
                world.at(world.between(0.001, 0.01), self, self._should_commit, self.token)
        if self.polling and machine.broken:
            self.polling = False
            world.at(0.0, self, self._then, self.token, self.boundary)
        if self._waits is not None and self._waits[0]():
            (_, then), self._waits = self._waits, None
            world.at(0.0, self, self._then, self.token, then)

    def look_again(self) -> None:
        """Something outside of the machine has changed that the script may wait for."""
        self._after()

    def _tick(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = -1.0
            self.dispatch(on.Tick())

    def _wait(self, ready: Callable[[], bool], then: Callable[[], None]) -> None:
        """The script waits until `ready`."""
        self._waits = ready, then
        self._after()

    def _then(self, token: int, then: Callable[[], None]) -> None:
        if token == self.token and not self.group.done:
            then()

    def on_push(self, push: Push) -> None:
        """Something arrived from the leader."""
        match push:
            case Answer():
                self._answered(push.seq, push.quorum)
            case Reason():
                self.dispatch(on.NoQuorumYet(push.text, push.paused_s))
            case Lost():
                self.dispatch(on.MemberLost(push.quorum_id, push.lost, push.held, push.moves))
            case Over():
                self.dispatch(on.Superseded(push.quorum_id))
            case Change():
                self.dispatch(on.ChangePending(push.quorum_id, push.reason))
            case Busy():
                self.dispatch(on.Paused(push.quorum_id, push.replica_id, push.for_s))
            case Order(kill=True):
                self.world.at(0.0, None, self.group.ordered_to_end, push.reason)
            case Order():
                self.dispatch(on.DrainOrdered(push.reason))
            case _:
                pass

    def _answered(self, seq: int, quorum: Quorum) -> None:
        formation = self.machine.formation
        if self.group.done or formation is None or formation.sent is None or formation.sent.seq != seq:
            return
        self.leave_ring()
        self.receiving.forget()
        self.world.history.entered(self.group, quorum, self.machine.highest_id)
        self.dispatch(on.QuorumAnswered(seq, quorum))

    def _send_ask(self, action: do.SendAsk) -> None:
        self.link.ask(action.ask)

    def _entered(self, action: do.Entered) -> None:
        plan = action.plan
        self.world.say(
            "%s enters %#x as rank %d of %d at %s%s", self.name, plan.quorum_id, plan.replica_rank, plan.size,
            plan.target, ", heals" if plan.heals else "",
        )  # fmt: skip

    def _abort(self, action: do.Abort) -> None:
        if self.ring is not None and self.ring.quorum.quorum_id <= action.quorum_id:
            self.world.say("%s aborts %#x: %s", self.name, action.quorum_id, self.machine.broken_reason)
            self.leave_ring()

    def _tell_group(self, action: do.TellGroup) -> None:
        if len(self.group.ranks) > 1:
            self.link.broke(action.quorum_id, action.reason)

    def _look(self, _: do.LookAtLinks) -> None:
        self.world.at(self.world.between(0.001, 0.02), self, self._looked)

    def _looked(self) -> None:
        unreachable, reached = self.group.look()
        self.dispatch(on.LinksSeen(unreachable, reached))

    def _report(self, action: do.Report) -> None:
        self.world.say("%s: %s", self.name, action.text)

    def _abort_user_group(self, action: do.AbortUserGroup) -> None:
        if self.ring is not None and self.ring.quorum.quorum_id == action.quorum_id:
            self.ops.abort(self.ring.quorum)

    def _nothing(self, _: do.Action) -> None:
        """The state of a rank is there to be had, and nothing else is under way in its ring."""

    # ------------------------------------------------------------ process groups

    def _configure(self, action: do.Configure) -> None:
        world, injected, plan = self.world, self.group.injected, action.plan
        if self.group.number == world.config.unbuilt_group:
            why, knows = "no such address", world.config.unbuilt_knows
            world.at(world.between(0.001, 0.05), self, self._unbuilt, plan, why, knows)
        elif "configure" in injected:
            injected.discard("configure")
            world.at(world.between(0.01, 0.5), self, self._unbuilt, plan, "injected", True)
        else:
            world.at(world.between(0.001, 0.01), self, self._arrive, plan)

    def _arrive(self, plan: Plan) -> None:
        world = self.world
        if self.machine.plan is not plan or self.machine.phase is not Phase.FORMING or self.group.done:
            return
        self.ring = world.ring(plan.quorum, self.index)
        world.at(world.config.connect_s, self, self._unbuilt, plan, "connect timeout", False)
        self.ring.arrive(self)

    def _unbuilt(self, plan: Plan, why: str, here: bool) -> None:
        if self.machine.plan is not plan or self.machine.phase is not Phase.FORMING or self.group.done:
            return
        self.world.say("%s cannot configure: %s", self.name, why)
        self._looked()
        self.leave_ring()
        self.dispatch(on.GroupsFailed(plan.quorum_id, why, here))

    def configured(self, ring: Ring) -> None:
        """The process group is up."""
        if self.ring is ring and not self.group.done:
            moves = self.machine.formation is not None and self.machine.formation.moves
            self.dispatch(on.GroupsUp(ring.quorum.quorum_id))
            self.world.history.moved += moves and self.machine.phase is Phase.OPEN

    def peer_ended(self, ring: Ring) -> None:
        """A connection of the process group was closed, and nothing is expected from it."""
        if self.ring is ring:
            self.dispatch(on.PeerEnded(ring.quorum.quorum_id))

    def leave_ring(self, *, hidden: bool = False) -> None:
        """Abort and drop the process group."""
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.leave(self, hidden=hidden)
            self.ops.abort(ring.quorum, hidden=hidden)

    @property
    def never_heals(self) -> bool:
        """It is set up so that no heal of it succeeds."""
        config = self.world.config
        return self.group.number == config.bad_group and config.bad_rank in (-1, self.index)

    # ------------------------------------------------------------ the script: start_quorum

    def boundary(self) -> None:
        """start_quorum()."""
        group, machine, world = self.group, self.machine, self.world
        if group.done:
            return
        self.token += 1
        self.reducing = self.polling = False
        self._waits = None
        self.ops.settled(committed=False)
        if self.back_at > world.now:  # the training thread is busy with what it announced
            world.at(self.back_at - world.now, self, self._then, self.token, self.boundary)
            return
        self._look_at_the_data()
        machine.trains_on(self.batch)
        if machine.forming:
            self._wait(lambda: not machine.forming, self._formed)
            return
        decision = machine.boundary()
        self.receiving.hand_out()
        if isinstance(decision, Go):
            if machine.attempt.awaits_lease and not machine.broken:
                world.at(world.between(0.05, 0.1), self, self._then, self.token, self._poll)
            elif machine.broken:  # its group agreed to stay: what broke is told in the next vote
                self.steps += 1
                self._vote()
            else:
                self._settle_in()
            return
        if group.leaving and (self.index == 0 or machine.plan is None) and machine.hands_over() is None:
            if decision.failed:
                self.leave_ring()
                self._tell_group(do.TellGroup(machine.quorum_id, decision.reason))
            group.goodbye("drained", agreed=not decision.failed, finished=False)
            return
        self._maybe_pause()
        self.asked_at = world.now
        template = Ask("", 0, **self._template())
        fresh = machine.wish is None
        wish = Wish(template, "job", world.config.quorum_s, prefetch=fresh, hands_over=group.leaving)
        self.dispatch(on.QuorumWanted(wish))
        self._wait(lambda: not machine.forming, self._formed)

    def _look_at_the_data(self) -> None:
        machine, number, config = self.machine, self.group.number, self.world.config
        if config.finish_at and machine.held.version.step >= config.finish_at:
            self.dispatch(on.DataEnded(applies=True, ends=False))
        if not config.rounds:
            return
        begun = machine.data.ended_at.step if machine.data.ended_at is not None else 0
        if machine.attempt.base.step - begun >= 3 + 3 * (number % 3):
            self.dispatch(on.DataEnded(applies=number % 2 == 0, ends=number == 0 and config.ends_rounds))
        else:
            self.dispatch(on.DataBack())

    def _template(self) -> dict[str, Any]:
        config = self.world.config
        return {
            "heals_before_forward": config.heals_before_forward, "allow_heal": config.allow_heal,
            "signature_lines": self.group.signature_lines(), "from_scratch": self.world.from_scratch,
        }  # fmt: skip

    def _formed(self) -> None:
        """There is a quorum, or the reason why there is none."""
        failure = self.machine.failure
        if failure is None:
            self._settle_in()
        elif self.group.leaving:
            self.group.goodbye("drained, and nobody took its last commit", agreed=False, finished=False)
        else:
            self._give_up(failure)

    def _give_up(self, failure: Exception) -> None:
        world, group = self.world, self.group
        if isinstance(failure, StateRefusedError):
            group.die(f"ends: {failure}")
        else:
            world.gives_up(self, self.asked_at, str(failure))
            group.die("gives up waiting for a quorum")
        if world.calm or world.rng.random() < 0.8:
            world.given_up.add(group.number)
            world.at(world.between(0.02, 1.0), None, world.restart, group.number)

    def _settle_in(self) -> None:
        """A first or a synchronous quorum heals before forward."""
        machine, plan = self.machine, self.machine.plan
        sync = plan is not None and (plan.heals_first or self.world.config.heals_before_forward)
        if sync and machine.receiving:
            self._wait(lambda: not (machine.forming or machine.receiving), self._settle_in)
            return
        if machine.failure is not None:
            self._give_up(machine.failure)
            return
        if sync:
            self.receiving.apply()
        if self.met_in != machine.quorum_id:
            self.met_in, self.batch = machine.quorum_id, machine.attempt.meets_at or self.batch
        self._forward()

    def _maybe_pause(self) -> None:
        """The training script announces that it will be busy, and may be back early."""
        world, group = self.world, self.group
        if "pause" not in group.injected or world.rng.randrange(len(group.ranks)):
            return
        group.injected.discard("pause")
        length = world.between(0.5, 4.0) if world.rng.random() < 0.7 else world.between(4.0, 14.0)
        self.busy_until = world.now + length * world.between(1.0, 5.0)
        self.back_at = world.now + length
        world.say("%s pauses for %.1f s", self.name, length)
        self.busy()
        world.at(length, self, self._back)

    def busy(self) -> None:
        """Announce what this rank is about to do, or that it is back."""
        self.dispatch(on.Paused(0, "", max(0.0, self.busy_until - self.world.now)))
        self.link.progress()

    def _back(self) -> None:
        self.world.say("%s is back", self.name)
        self.busy_until = self.back_at = 0.0
        self.busy()

    def _poll(self) -> None:
        """No member had a lease for autonomy_s: the members sum up who has one again, and nothing else."""
        if self.ring is None or self.machine.broken:
            self.boundary()
            return
        self.polling, attempt = True, self.machine.attempt
        leased = not attempt.lacks_lease(self.world.now)
        op = self.ring.launch(self, ([float(leased)], 0, None, (-1, attempt.base, 0, 0), 0))
        self._limit(self.token, op)

    def polled(self, op: Op) -> None:
        """That sum has arrived."""
        if self.ring is not op.ring or not self.machine.attempt.awaits_lease or self.group.done:
            return
        if any(payload[0][0] for payload in op.payloads()):
            self.dispatch(on.LeaseReturned())
        self.boundary()

    # ------------------------------------------------------------ the script: forward and backward

    def _forward(self) -> None:
        world, group, token = self.world, self.group, self.token
        self.steps += 1
        length = world.config.forward_s * world.between(0.5, 1.5)
        if world.now < group.slow_until:
            length *= 8
        self._maybe_pause()
        length += max(0.0, self.back_at - world.now)
        self.machine.opened(world.now, pinned=False)
        if "soft" in group.injected and not world.rng.randrange(len(group.ranks)):
            group.injected.discard("soft")
            self.dispatch(on.SoftError(ValueError("a NaN was found")))
        parts = world.config.user_ops + 1
        world.at(length / parts, self, self._then, token, functools.partial(self._compute, length / parts, 1, parts))

    def _compute(self, length: float, part: int, parts: int) -> None:
        """Forward has come so far: between its parts the script makes collectives of its own."""
        if self.world.config.inside and any(rank.stopped for rank in self.group.ranks):
            hangs = functools.partial(self._compute, length, part, parts)
            self.world.at(0.05, self, self._then, self.token, hangs)
            return
        if part == parts:
            self._launch()
            return
        world, machine = self.world, self.machine
        go_on = functools.partial(self._go_on, length, part + 1, parts)
        machine.pin()
        if machine.forming:
            self._wait(lambda: not machine.forming, functools.partial(self._compute, length, part, parts))
            return
        if "skip_op" in self.group.injected:
            self.group.injected.discard("skip_op")
            self._leaves_out_a_collective()
            go_on()
            return
        self.ops.launch(part)
        if world.config.waits_for_ops:
            self._wait(lambda: not self.ops.under_way, go_on)
        else:
            go_on()

    def _leaves_out_a_collective(self) -> None:
        world = self.world
        world.say("%s: the script leaves out a collective that the others make", self.name)
        self.ops.left_out()
        if world.config.waits_for_ops:  # the others wait for it, and then for each other
            late_s = 1.5 * world.config.timeout_s
            self.group.late_until = world.now + late_s
            world.at(late_s, None, world.trouble)

    def _go_on(self, length: float, part: int, parts: int) -> None:
        self.world.at(length, self, self._then, self.token, functools.partial(self._compute, length, part, parts))

    def _launch(self) -> None:
        """Backward comes to the last bucket."""
        machine, world = self.machine, self.world
        if self.back_at > world.now:
            world.at(self.back_at - world.now, self, self._then, self.token, self._launch)
            return
        machine.pin()
        if machine.forming or machine.receiving:
            self._wait(lambda: not (machine.forming or machine.receiving), self._launch)
            return
        if machine.failure is not None and (machine.plan is None or isinstance(machine.failure, StateRefusedError)):
            self._give_up(machine.failure)
            return
        if self.ring is None or not machine.may_launch(world.now):
            self._vote()
            return
        attempt = machine.attempt
        payload = (
            machine.ballot(world.now), self.group.key, self.state if attempt.contributes else None,
            (attempt.number, attempt.base, len(attempt.participants), self.batch), self._share(),
        )  # fmt: skip
        self.reducing = True
        op = self.ring.launch(self, payload)
        self._limit(self.token, op)
        self._mistakes()

    def _mistakes(self) -> None:
        injected, world = self.group.injected, self.world
        if "skip" in injected:
            injected.discard("skip")
            world.say("%s: the training script starts the next step without should_commit", self.name)
            world.at(world.between(0.001, 0.05), self, self._skip, self.token)
        if "late" in injected and world.rng.random() < 0.6:
            injected.discard("late")
            late = self._late_bucket if world.rng.random() < 0.6 else self._late_soft
            world.at(world.between(0.0, 0.05), self, late, self.token, self.machine.attempt.number)

    def _share(self) -> int:
        """The samples in this rank's gradient; zeros have none."""
        attempt, ranks = self.machine.attempt, len(self.group.ranks)
        self.places = len(attempt.participants)
        if not attempt.contributes or attempt.plan is None:
            return 0
        place = attempt.participants.index(attempt.plan.replica_rank)
        return self.samples.share(place * ranks + self.index, self.places * ranks)

    def _skip(self, token: int) -> None:
        if token == self.token and self.machine.phase is Phase.REDUCING:
            self.batch += self.world.config.drops_batches
            self.boundary()

    def _late_bucket(self, token: int, attempt: int) -> None:
        """A bucket of this attempt fails after the fence was launched: this member alone cannot follow."""
        if token == self.token and self.machine.attempt.number == attempt:
            self.world.say("%s: a bucket fails late", self.name)
            failed = CollectiveError("a bucket failed")
            rules = self.world.config.member_rules
            self.dispatch(on.CollectiveFailed(failed) if rules.r0_verdict else on.SoftError(failed))

    def _late_soft(self, token: int, attempt: int) -> None:
        if token == self.token and self.machine.attempt.number == attempt:
            self.world.say("%s: report_error after the fence was launched", self.name)
            self.dispatch(on.SoftError(ValueError("reported late")))

    def _limit(self, token: int, op: Op) -> None:
        """A collective begins: it may last for the timeout, and longer while somebody has announced a pause."""
        self.world.at(self.world.config.timeout_s, self, self._timed_out, token, op, self.world.now)

    def _timed_out(self, token: int, op: Op, since: float) -> None:
        world, machine = self.world, self.machine
        if token != self.token or (machine.phase is not Phase.REDUCING and not machine.attempt.awaits_lease):
            return
        later = machine.overdue(world.config.timeout_s, world.now)
        if later is not None:
            world.at(later - world.now, self, self._timed_out, token, op, since)
            return
        world.paused_peer(self, since, "a collective timed out")
        self._looked()
        self.op_failed(op, "collective timeout")

    def op_failed(self, op: Op, why: str) -> None:
        """The data plane reports an error."""
        machine = self.machine
        polls = machine.attempt.awaits_lease and machine.phase is Phase.OPEN
        if (machine.phase is Phase.REDUCING or polls) and self.ring is op.ring and not self.group.done:
            self.world.say("%s: %s", self.name, why)
            self.dispatch(on.CollectiveFailed(CollectiveError(why)))

    def fence_done(self, op: Op) -> None:
        """The sum of all ballots has arrived."""
        machine, world, group = self.machine, self.world, self.group
        if self.ring is not op.ring or machine.phase is not Phase.REDUCING or group.done:
            return
        op.check_aligned()
        op.check_batches()
        verdict, actions = machine.count(op.sums(), world.now)
        if verdict.outcome is Outcome.BROKEN:
            world.say("%s: %s", self.name, verdict.reason)
            self._perform(actions)
            return
        self._after()
        if world.config.op_after:
            self.ops.launch(0)
        op.check_scaled()
        if group.stable() >= machine.attempt.base and group.ranks[0].machine.held.version == machine.attempt.base:
            world.history.publish(group.ranks[0])
        payloads = op.payloads()
        gradients = tuple((key, state) for _, key, state, *_ in payloads if state is not None)
        self.pending = gradients, machine.divisor(verdict), functools.reduce(operator.or_, (p[4] for p in payloads))
        if verdict.outcome is Outcome.COMMIT:
            world.history.check_roles(self, op, verdict)
        self._comes_to_its_vote()

    # ------------------------------------------------------------ the script: should_commit

    def _comes_to_its_vote(self) -> None:
        world, group = self.world, self.group
        if "late_vote" in group.injected and not world.rng.randrange(len(group.ranks)):
            group.injected.discard("late_vote")
            limit_s = world.config.timeout_s
            late_s = limit_s + world.between(-0.02, 0.02) if world.rng.random() < 0.5 else limit_s * world.between(0, 2)
            world.say("%s: the script calls should_commit after %.1f s", self.name, late_s)
            group.late_until = world.now + late_s
            world.at(late_s, self, self._should_commit, self.token)
            world.at(late_s, None, world.trouble)
        elif world.rng.random() < 0.2:
            world.at(world.between(0.0, 0.03), self, self._should_commit, self.token)
        else:
            self._vote()

    def _should_commit(self, token: int) -> None:
        if token == self.token and not self.group.done:
            self._vote()

    def _vote(self) -> None:
        """The ballots are back, or never will be: no collective of the script's is under way when its rank votes."""
        self.reducing = False
        if self.machine.plan is None:
            self.boundary()
            return
        self.ops.end_for_vote()
        if self.ops.under_way:
            self._wait(lambda: not self.ops.under_way, self._vote_now)
        else:
            self._vote_now()

    def _vote_now(self) -> None:
        world, machine = self.world, self.machine
        vote = machine.own_vote()
        if len(self.group.ranks) > 1:
            wait = Wait(self.link.verdicts.pauses, world.config.timeout_s, world.now)
            world.at(wait.at - world.now, self, self._vote_expires, self.token, vote, wait, world.now)
        self.link.vote(vote)

    def _vote_expires(self, token: int, vote: Verdict, wait: Wait, since: float) -> None:
        """The other ranks of the group have not voted in time."""
        world = self.world
        if (
            token != self.token
            or self.group.done
            or self.link.verdicts.result(vote.quorum_id, vote.attempt) is not None
        ):
            return
        if not wait.over(world.now):
            world.at(wait.at - world.now, self, self._vote_expires, token, vote, wait, since)
            return
        world.paused_peer(self, since, "a vote timed out")
        reason = "the ranks did not agree in time"
        self.link.expire(Verdict(vote.quorum_id, vote.attempt, Outcome.BROKEN, reason))

    def settle(self, verdict: Verdict) -> None:
        """should_commit() has the group's verdict."""
        machine, world, group = self.machine, self.world, self.group
        attempt = machine.attempt
        if group.done or (machine.quorum_id, attempt.number) != (verdict.quorum_id, verdict.attempt):
            return
        if verdict.outcome is not Outcome.BROKEN:
            self.receiving.apply()
        before, samples, was_broken = self.state, self.samples, machine.phase is not Phase.COUNTED
        commit, actions = machine.settle(verdict)
        self.batch += commit or world.config.drops_batches
        self.ops.settled(committed=commit)
        if commit:
            assert self.pending is not None
            gradients, divisor, got = self.pending
            self.state = hash((3, before, gradients, divisor))
            self.samples = samples.after(got, self.places, len(group.ranks), verdict.missing)
            group.commits += not self.index
            world.say("%s commits %s (%d gradients)", self.name, machine.held.version, len(gradients))
            world.history.committed(self, before, gradients, divisor)
            world.history.read(self, samples, got)
            if "shutdown" in group.injected and len(group.ranks) == 1:
                world.history.parted(self)
                group.goodbye("shut down after a commit", agreed=False, finished=False)
                world.at(world.between(0.5, 4.0), None, world.restart, group.number)
                return
        self._perform(actions)
        if not was_broken and not machine.broken:
            world.history.settled(self, verdict)
            world.history.lapsed(self, verdict)
            if world.config.rounds:  # who trains alone and lost an attempt as it had no lease has not finished
                if verdict.exhausted:
                    world.say("%s: the data pass ended at %s", self.name, machine.data.ended_at)
            elif verdict.exhausted or (machine.data.exhausted and machine.plan is not None and machine.plan.size == 1):
                group.goodbye("out of data", agreed=True, finished=True)
                return
        if verdict.outcome is not Outcome.COMMIT:
            world.say("%s: not committed: %s", self.name, verdict.reason)
        self.token += 1
        world.at(world.between(0.0, 0.003), self, self._then, self.token, self.boundary)


PERFORM: Mapping[type[do.Action], Callable[[Rank, Any], None]] = {
    do.Prefetch: lambda rank, action: rank.receiving.prefetch(action),
    do.SendAsk: Rank._send_ask,
    do.Entered: Rank._entered,
    do.Offer: Rank._nothing,
    do.OfferLive: lambda rank, _: rank.receiving.hand_out(),
    do.Configure: Rank._configure,
    do.Receive: lambda rank, action: rank.receiving.receive(action.plan),
    do.CancelReceive: Rank._nothing,
    do.Abort: Rank._abort,
    do.AbortUserGroup: Rank._abort_user_group,
    do.TellGroup: Rank._tell_group,
    do.TellParted: Rank._nothing,
    do.LookAtLinks: Rank._look,
    do.Report: Rank._report,
}
"""What the simulation does about each action."""
