"""Managers as threads: `Cluster` holds a loopback lighthouse, `Replica` is one training process with faults to order.

A replica trains a small model on batches seeded by (replica, step). `at={(step, point): action}` runs `action(replica)`
once, when the replica reaches that point of that step. Points, in order: boundary (before start_quorum), started,
forward, backward (gradients are there), stepped (after optimizer.step). An action may raise `Crash`: the replica dies
as by SIGKILL (sockets and lease closed, no goodbye); any other exception leaves the training loop, and the replica
shuts its Manager down as a script's `finally` would.

Every commit is recorded with the digest of the whole state. `Cluster.check` asserts what DESIGN 4 promises of them.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ft_core import DistributedDataParallel, Manager, OptimizerWrapper, ProcessGroupGloo

if TYPE_CHECKING:
    from ft_core.process_group import ProcessGroup
    from tests.runtime.loopback import Loopback, LoopbackControl

LIMIT_S = 20.0
"""How long a test may wait for anything."""
PATIENT_S = 2 * LIMIT_S
"""A limit that is never reached: whoever waits for so long hangs, to the test."""
PATIENT: dict[str, Any] = {"timeout": timedelta(seconds=PATIENT_S)}
"""Options of a replica all of whose waits, when it ends, are like that; with `exit_s(PATIENT_S)`."""
FEATURES, CLASSES, BATCH = 6, 3, 4


class Crash(BaseException):
    """This replica is killed here."""


class SupervisedCrash(Crash):
    """The same, and a supervisor has seen the end of the process."""


@dataclass(frozen=True)
class Commit:
    """One committed step as one replica saw it."""

    step: int
    quorum_id: int
    digest: str
    participated: bool
    batches: int


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


adamw(mlp())
"""torch imports a second's worth of modules with its first optimizer: not while replicas wait for each other."""


def batch_of(replica: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def digest_of(*states: Any) -> str:
    """Of every tensor and number in nested state dicts."""
    hashed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            hashed.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in value:
                hashed.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            hashed.update(repr(value).encode())

    add(states)
    return hashed.hexdigest()[:16]


Action = Callable[["Replica"], object]


class Replica:
    """One training process, as a thread."""

    def __init__(
        self,
        index: int,
        *,
        steps: int = 6,
        at: Mapping[tuple[int, str], Action] | None = None,
        build: Callable[[], nn.Module] = mlp,
        optim: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        seed: int | None = None,
        name: str | None = None,
        pg: Callable[[], ProcessGroup] | None = None,
        loop: Callable[[Replica], None] | None = None,
        setup: Action | None = None,
        catch: type[BaseException] | tuple[type[BaseException], ...] = (),
        max_iterations: int = 200,
        **options: Any,
    ) -> None:
        self.index, self.steps, self.name = index, steps, name or f"r{index}"
        self.seed = index if seed is None else seed
        self.actions = dict(at or {})
        self.catch = catch
        """Errors out of one iteration that the training script survives."""
        self.caught: list[BaseException] = []
        self.commits: list[Commit] = []
        self.vetoes: list[int] = []
        self.offered: set[int] = set()
        """Steps (as numbered after the commit) for which this replica launched a gradient that was to count."""
        self.error: BaseException | None = None
        self.crashed = False
        self.step = 0
        self.iterations = 0
        self.gate = threading.Event()
        """For actions that hang until the test releases them."""
        self.manager: Manager
        self.model: nn.Module
        self.ddp: nn.Module
        self.inner: torch.optim.Optimizer
        self.optimizer: OptimizerWrapper
        self.pg: ProcessGroup
        self.cluster: Cluster
        self._build, self._optim, self._pg, self._loop, self._setup = build, optim, pg, loop, setup
        self._options = options
        self._max_iterations = max_iterations
        self.thread = threading.Thread(target=self._run, name=f"train-{self.name}", daemon=True)

    def __repr__(self) -> str:
        return f"Replica({self.name}, step {self.step}, {len(self.commits)} commits, error={self.error!r})"

    # ------------------------------------------------------------ the training script

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optim"])

    def make_manager(self) -> Manager:
        options: dict[str, Any] = {
            "min_replica_size": 1, "timeout": timedelta(seconds=10), "lighthouse_addr": "localhost:1",
            "hostname": "127.0.0.1", "replica_id": self.name, "expected_replicas": self.cluster.expected,
            "load_state_dict": lambda state: self.load_state_dict(state), "state_dict": lambda: self.state_dict(),
        }  # fmt: skip
        self.pg = self._pg() if self._pg else ProcessGroupGloo(hostname="127.0.0.1")
        return Manager(self.pg, **(options | self._options))

    def wrap(self) -> None:
        self.ddp = DistributedDataParallel(self.manager, self.model)
        self.optimizer = OptimizerWrapper(self.manager, self.inner)

    def at(self, point: str) -> None:
        """Act as ordered for this step, or for one that this replica never came to: it was healed over it.

        That can happen at any death: who waits in a fence when a connection ends may miss a commit that others have.
        """
        due = [(step, where) for step, where in self.actions if where == point and step <= self.step]
        if due:
            self.actions.pop(min(due))(self)

    def loss(self) -> Tensor:
        x, y = batch_of(self.index, self.manager.current_step())  # a newcomer was healed by start_quorum
        return nn.functional.cross_entropy(self.ddp(x), y)

    def iteration(self) -> None:
        """One try at a step, with its points."""
        self.step = self.manager.current_step()
        self.at("boundary")
        self.optimizer.zero_grad()
        self.at("started")
        loss = self.loss()
        self.at("forward")
        loss.backward()
        participated = self.manager.is_participating()
        if participated:
            self.offered.add(self.manager.current_step() + 1)
        self.at("backward")
        self.optimizer.step()
        self.record(self.optimizer.committed, participated)
        self.at("stepped")

    def record(self, committed: bool, participated: bool) -> None:
        if not committed:
            self.vetoes.append(self.step)
            return
        state = self.manager.state_dict()
        self.commits.append(
            Commit(state["step"], state["quorum_id"], self.digest(), participated, self.manager.batches_committed())
        )

    def digest(self) -> str:
        return digest_of(self.model.state_dict(), self.inner.state_dict())

    def train(self) -> None:
        while self.manager.current_step() < self.steps:
            self.iterations += 1
            assert self.iterations <= self._max_iterations, f"no progress: {self.manager!r}"
            try:
                self.iteration()
            except self.catch as error:
                self.caught.append(error)

    # ------------------------------------------------------------ life and death

    def _run(self) -> None:
        try:
            with self.cluster.build_lock:  # torch's global generator is shared by all threads
                torch.manual_seed(self.seed)
                self.model = self._build()
            self.inner = self._optim(self.model)
            self.manager = self.make_manager()
            if self._setup is not None:
                self._setup(self)
            else:
                self.wrap()
            try:
                self._loop(self) if self._loop else self.train()
            except Crash as how:
                self.crashed = True
                self.die()
                if isinstance(how, SupervisedCrash):
                    self.cluster.lighthouse.ended(self.manager.replica_id)
            finally:
                self.manager.shutdown()
        except BaseException as error:  # noqa: BLE001 - shown by Cluster.check
            self.error = error

    def die(self) -> None:
        """As by SIGKILL: connections close, nothing is said."""
        manager = self.manager
        manager._runtime.leaving.left = True
        manager._runtime.pinned()  # its threads live on, and must not ask for it
        cast("LoopbackControl", manager._runtime.shell.control).connected = False
        manager._runtime.shell.communicators.abort()
        self.cluster.lighthouse.cut(manager.replica_id)

    def join(self, timeout_s: float = LIMIT_S) -> None:
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            names = {t.ident: t.name for t in threading.enumerate() if t.name.startswith(("train", "ft-quorum"))}
            stacks = [
                f"--- {names[ident]}\n" + "".join(traceback.format_stack(frame)[-7:])
                for ident, frame in sys._current_frames().items()
                if ident in names
            ]
            raise AssertionError(f"{self!r} hangs: {getattr(self, 'manager', None)!r}\n" + "\n".join(stacks))


class Cluster:
    """A lighthouse and the replicas started on it."""

    def __init__(self, lighthouse: Loopback) -> None:
        self.lighthouse = lighthouse
        self.expected = 0
        self.replicas: list[Replica] = []
        self.build_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Cluster({self.replicas})"

    def start(self, *replicas: Replica) -> None:
        for replica in replicas:
            replica.cluster = self
            self.replicas.append(replica)
        for replica in replicas:
            replica.thread.start()

    def run(self, *replicas: Replica, expected: int | None = None) -> None:
        """Start them as the job's configured groups, and wait for all (those that actions start included)."""
        self.expected = len(replicas) if expected is None else expected
        self.start(*replicas)
        self.join()

    def join(self) -> None:
        for replica in self.replicas:  # grows while actions start others
            replica.join()

    def joins(self, replica: Replica) -> Action:
        """An action for a boundary: start `replica` and make sure that it gets in before the others finish.

        A newcomer first copies live state, which donors offer at their next boundary: so wait until it wants to, then,
        one step later, until it asks. How many steps they make while it copies is not chosen: a test of a newcomer says
        that its first commit is behind the one of the actor's boundary (it was healed), not which one it is.
        """
        lighthouse = self.lighthouse

        def asks() -> bool:
            return lighthouse.asking(replica.name) or bool(replica.commits) or not replica.thread.is_alive()

        def wanted() -> bool:
            others = [r for r in self.replicas if r is not replica and r.thread.is_alive()]
            managers = [r.manager for r in others if hasattr(r, "manager")]  # one may still be about to make it
            return asks() or any(m._runtime.shell.transfer.snapshot_wanted for m in managers)

        def act(actor: Replica) -> None:
            self.start(replica)
            lighthouse.wait_for(wanted)
            if asks() or self._last_chance(actor):
                self.lets_in(replica)(actor)
                return
            self._later(actor, self.lets_in(replica))

        return act

    @staticmethod
    def _last_chance(actor: Replica) -> bool:
        """At the next boundary an ask is too late: the one after it, where a quorum would form, is the end."""
        return actor.step + 3 > actor.steps

    @staticmethod
    def _later(actor: Replica, action: Action) -> None:
        for later in (1, 2):  # with two votes per quorum steps count by two
            actor.actions[actor.step + later, "boundary"] = action

    def lets_in(self, replica: Replica) -> Action:
        """An action: wait until `replica` asks for a quorum and the actor was told so (else it might finish before).

        Not for what needs the actor: a newcomer may want its live state (the other donor has died), which it offers at
        this boundary, and one whose quorum broke is told of no newcomer: it asks now, and the others wait for it.
        """
        commits = len(replica.commits)

        def act(actor: Replica) -> None:
            manager, lighthouse = actor.manager, self.lighthouse
            step = manager._runtime.rank
            for place in [place for place, action in actor.actions.items() if action is act]:
                del actor.actions[place]  # see `_later`: the newcomer is in by then, and may wait for the actor

            def comes() -> bool:
                is_in = len(replica.commits) > commits or not replica.thread.is_alive()
                return is_in or lighthouse.asking(replica.name)

            lighthouse.wait_for(lambda: comes() or manager._runtime.shell.transfer.snapshot_wanted)
            if not comes() and not self._last_chance(actor):
                self._later(actor, act)
                return
            while not comes():  # a later boundary would be too late: the state is given here
                if manager._runtime.shell.transfer.snapshot_wanted:
                    manager._runtime.shell.transfer.offer_live(manager._runtime.views.whole)
                lighthouse.wait_for(lambda: comes() or manager._runtime.shell.transfer.snapshot_wanted)
            lighthouse.wait_for(
                lambda: step.change_wanted or step.ask_next or step.broken or not lighthouse.asking(replica.name)
            )

        return act

    # ------------------------------------------------------------ what must hold

    def check(self, *, steps: int | None = None, survivors: int | None = None, errors: bool = False) -> None:
        """DESIGN 4: one state per version, one version per step, no step lost or repeated, one divisor for all."""
        story = "\n".join(self.lighthouse.log)
        if not errors:
            assert [r for r in self.replicas if r.error is not None] == [], story
        self._forget_the_dead()
        by_version: dict[tuple[int, int], set[str]] = {}
        quorum_ids: dict[int, set[int]] = {}
        batches: dict[int, set[int]] = {}
        for replica in self.replicas:
            numbers = [c.step for c in replica.commits]
            assert numbers == sorted(set(numbers)), f"{replica.name} went back: {numbers}"
            for commit in replica.commits:
                by_version.setdefault((commit.step, commit.quorum_id), set()).add(commit.digest)
                quorum_ids.setdefault(commit.step, set()).add(commit.quorum_id)
                batches.setdefault(commit.step, set()).add(commit.batches)
        assert {v: d for v, d in by_version.items() if len(d) > 1} == {}, f"differing states\n{story}"
        assert {s: e for s, e in quorum_ids.items() if len(e) > 1} == {}, f"a step was committed twice\n{story}"
        assert {s: b for s, b in batches.items() if len(b) > 1} == {}, f"batches_committed differs\n{story}"
        if steps is not None:
            assert sorted(quorum_ids) == list(range(1, steps + 1)), story
            final = [r for r in self.replicas if r.commits and r.commits[-1].step == steps]
            assert len(final) == (survivors if survivors is not None else len(self.replicas)), f"{self!r}\n{story}"

    def _forget_the_dead(self) -> None:
        """What only a crashed replica committed died with it, and may be committed again (DESIGN 4.3)."""
        lasting = {(c.step, c.quorum_id) for r in self.replicas if not r.crashed for c in r.commits}
        for replica in self.replicas:
            if replica.crashed:
                replica.commits = [c for c in replica.commits if (c.step, c.quorum_id) in lasting]

    def contributors(self) -> dict[int, set[int]]:
        """Indices of the replicas whose gradients are in each committed step.

        A replica whose gradient is in the sum may not have lived to see the commit (or healed past it): what
        batches_committed counted beyond those who did is among the offers.
        """
        out: dict[int, set[int]] = {}
        counts = {c.step: c.batches for r in self.replicas for c in r.commits}
        for step in sorted(counts):
            seen = [r for r in self.replicas if any(c.step == step for c in r.commits)]
            sure = {r.index for r in seen if any(c.step == step and c.participated for c in r.commits)}
            count = counts[step] - counts.get(step - 1, 0)
            if len(sure) < count:
                sure |= {r.index for r in self.replicas if step in r.offered and r not in seen}
            assert len(sure) == count, f"step {step}: {count} gradients counted, offered by {sorted(sure)}"
            out[step] = sure
        return out

    def check_numbers(self, build: Callable[[], nn.Module] = mlp, optim: Any = adamw, atol: float = 1e-5) -> None:
        """The final parameters are those of one process that saw the contributors' batches concatenated."""
        contributors = self.contributors()
        steps = max(contributors)
        first = min(contributors)
        assert first == 1
        for source in self.replicas:  # step 0 is the state of one of them
            torch.manual_seed(source.seed)
            model = build()
            optimizer = optim(model)
            total = 0
            for step in range(first, steps + 1):
                parts = [batch_of(index, step - 1) for index in sorted(contributors[step])]
                total += len(parts)
                x, y = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            ends = [r for r in self.replicas if r.commits and r.commits[-1].step == steps]
            got = ends[0].model.state_dict()
            if all(torch.allclose(got[k], v, atol=atol) for k, v in model.state_dict().items()):
                assert ends[0].commits[-1].batches == total
                return
        raise AssertionError("the parameters are not those of the reference run, whoever the source of step 0 was")


# ------------------------------------------------------------ faults


def crash(_: Replica) -> None:
    raise Crash


def crash_seen(_: Replica) -> None:
    """A crash that a supervisor reports: what the dead one held is not waited for."""
    raise SupervisedCrash


def soft_error(replica: Replica) -> None:
    replica.manager.report_error(RuntimeError("NaN in the loss"))


def fail(error: Exception) -> Action:
    def act(_: Replica) -> None:
        raise error

    return act


def hang(replica: Replica) -> None:
    """Until the test opens the replica's gate."""
    assert replica.gate.wait(LIMIT_S)


def both(*actions: Action) -> Action:
    def act(replica: Replica) -> None:
        for action in actions:
            action(replica)

    return act
