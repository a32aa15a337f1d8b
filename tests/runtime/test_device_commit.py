"""Managers whose gradients are on a device: the host waits for it, is interruptible, and applies nothing cut short.

The device is `tests.devices`: the group's works end later than `backward` launched them, on another thread.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from ft_core import DistributedDataParallel, OptimizerWrapper
from ft_core.errors import CollectiveError, ConfigError
from tests.devices import LIMIT_S, DeviceGroup, FakeDevice
from tests.runtime.harness import (
    PATIENT,
    Cluster,
    Replica,
    adamw,
    batch_of,
    crash,
    digest_of,
    sgd,
    soft_error,
    with_batch_norm,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core import Manager
    from ft_core.process_group import ProcessGroup
    from ft_core.reduction.bucket_reducer import BucketReducer

SMALL_MB = 1e-4
"""Buckets of some hundred bytes: several of them in the tests' models."""


class OnDevice(Replica):
    """A replica whose tensors count as those of a device."""

    def __init__(self, index: int, **options: Any) -> None:
        self.device = FakeDevice(f"r{index}")
        self.group: DeviceGroup
        super().__init__(index, pg=self.make_group, **options)

    def make_group(self) -> ProcessGroup:
        self.group = DeviceGroup(self.device)
        return self.group

    def make_manager(self) -> Manager:
        manager = super().make_manager()
        manager._runtime.shell.communicators.device_of = lambda _device: self.device
        return manager

    def wrap(self) -> None:
        self.ddp = DistributedDataParallel(self.manager, self.model, bucket_cap_mb=SMALL_MB)
        self.optimizer = OptimizerWrapper(self.manager, self.inner)


@pytest.fixture
def devices(cluster: Cluster) -> Iterator[None]:
    """Ends the streams of the devices."""
    yield
    for replica in cluster.replicas:
        replica.join()
        if isinstance(replica, OnDevice):
            replica.device.close()


pytestmark = pytest.mark.usefixtures("devices")


def test_a_model_with_buffers_and_unused_parameters_trains_as_on_the_cpu(cluster: Cluster) -> None:
    """Bit for bit, one bucket after the other, though the host is told of each sum only once it has waited."""
    build = with_unused
    on_device = [OnDevice(0, build=build, seed=3), OnDevice(1, build=build, seed=3)]
    cluster.run(*on_device)
    cluster.check(steps=6)
    assert all(r.device.looks > 0 for r in on_device)
    others = [Replica(index, name=f"cpu{index}", build=build, seed=3, room_id="cpu") for index in (0, 1)]
    cluster.run(*others)
    assert {r.commits[-1].digest for r in cluster.replicas} == {on_device[0].commits[-1].digest}


class Unused(nn.Module):
    """The last layer is used by nobody, the one before it by replica 1 alone (its batches are told apart by shape)."""

    def __init__(self) -> None:
        super().__init__()
        self.used = with_batch_norm()
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


def with_unused() -> nn.Module:
    return Unused()


def test_a_gradient_that_nobody_has_is_none_when_backward_returns(cluster: Cluster) -> None:
    seen: list[bool] = []

    def look(replica: Replica) -> None:
        assert isinstance(replica.model, Unused)
        first: nn.Linear = replica.model.used[0]  # type: ignore[index]
        seen.append(replica.model.idle.weight.grad is None and first.weight.grad is not None)

    cluster.run(*(OnDevice(index, build=with_unused, at={(2, "backward"): look}) for index in (0, 1)))
    cluster.check(steps=6)
    assert seen == [True, True]


# ------------------------------------------------------------ what is cut short


def cut(number: int) -> Callable[[Replica], None]:
    """The number-th work from here on is cut short, which its group knows before it ends."""

    def act(replica: Replica) -> None:
        assert isinstance(replica, OnDevice)
        group, aborted, first = replica.group, replica.group.aborted, replica.group.launched

        def at_end(launched: int, tensors: list[Tensor]) -> bool:
            if group.aborted is aborted and launched == first + number:
                group.fail(CollectiveError("its bucket was cut short"))
                return False
            return group.when_looked_at(launched, tensors)

        group.at_end = at_end

    return act


def test_a_step_whose_bucket_was_cut_short_is_not_applied_though_its_fence_is_whole(cluster: Cluster) -> None:
    """The peer commits it, that replica heals. What it has is garbage, and nothing but the group's error says so."""
    told: list[str] = []

    def remember(replica: Replica) -> None:
        told.append(str(replica.manager.errored()))

    cutting = OnDevice(1, at={(3, "boundary"): cut(0), (3, "backward"): remember})
    other = OnDevice(0)
    cluster.run(other, cutting)
    cluster.check(steps=6)
    assert "its bucket was cut short" in told[0]
    assert cutting.vetoes[0] == 3
    assert 4 in [c.step for c in other.commits], "the fence was whole for the other"
    assert other.commits[-1].digest == cutting.commits[-1].digest


def test_with_the_fence_on_the_cpu_nobody_commits_what_one_device_has_not(cluster: Cluster) -> None:
    """Its ballot is sent after its device has finished; so here it never is, and the step is done again."""
    cutting = OnDevice(1, at={(3, "boundary"): cut(0)}, fence="cpu")
    other = OnDevice(0, fence="cpu")
    cluster.run(other, cutting)
    cluster.check(steps=6)
    assert cutting.vetoes == [3]
    assert other.vetoes == [3]
    assert [r.manager._runtime.steps.rides for r in (cutting, other)] == [False, False]


def test_with_the_fence_on_the_cpu_no_ballot_is_sent_before_the_device_has_finished(cluster: Cluster) -> None:
    slow, other = OnDevice(0, fence="cpu"), OnDevice(1, fence="cpu")
    gate, committed = threading.Event(), []

    def begin(_: Replica) -> None:
        slow.group.at_end = lambda _number, _tensors: gate.wait(LIMIT_S)
        first = slow.device.looks

        def look(looks: int) -> None:
            if looks == first + 200:
                # The other has long been finished: it waits for this ballot.
                cluster.lighthouse.wait_for(lambda: other.manager._runtime.rank.attempt.launched_at > 0)
                committed.append([c.step for c in other.commits])
                gate.set()

        slow.device.on_look = look

    slow.actions[3, "boundary"] = begin
    cluster.run(slow, other)
    cluster.check(steps=6)
    assert committed == [[1, 2, 3]]


# ------------------------------------------------------------ the wait ends


class Stuck:
    """From the boundary of a step on, the works of a replica's device do not end before an abort, or after it.

    They linger: nothing but a flag can end the wait of the host, as the device is not finished before the next
    `configure` of its group.
    """

    def __init__(self, on_look: Callable[[OnDevice], object] = lambda _replica: None) -> None:
        self._on_look = on_look
        self.waited = 0

    def __call__(self, replica: Replica) -> None:
        assert isinstance(replica, OnDevice)
        group, aborted, first = replica.group, replica.group.aborted, replica.device.looks
        group.lingers = True

        def at_end(number: int, tensors: list[Tensor]) -> bool:
            if group.aborted is not aborted:
                return group.when_looked_at(number, tensors)
            aborted.wait(LIMIT_S)
            return False

        def look(looks: int) -> None:
            self.waited += group.aborted is aborted
            if looks == first + 5:
                self._on_look(replica)

        group.at_end, replica.device.on_look = at_end, look


def test_the_wait_ends_at_the_timeout(cluster: Cluster) -> None:
    stuck = Stuck()
    told: list[str] = []

    def remember(replica: Replica) -> None:
        told.append(str(replica.manager.errored()))

    limits: dict[str, Any] = {"timeout": timedelta(seconds=1.5), "time_overrides": {"liveness_s": 0.5}}
    first = OnDevice(0, at={(3, "boundary"): stuck, (3, "backward"): remember}, **limits)
    cluster.run(first, OnDevice(1, **PATIENT))
    cluster.check(steps=6)
    assert stuck.waited > 0
    assert "did not take part in a collective within timeout=1.5 s" in told[0], told


def test_the_wait_ends_at_the_push_of_a_lost_member(cluster: Cluster) -> None:
    """No timeout is shorter than the test: the push alone ends it. The device itself is stuck for longer."""
    waiting = threading.Event()

    def die(replica: Replica) -> None:
        waiting.wait(LIMIT_S)
        crash(replica)

    dead = OnDevice(1, at={(3, "forward"): die}, **PATIENT)
    stuck = Stuck(lambda _replica: waiting.set())
    survivor = OnDevice(0, at={(3, "boundary"): stuck}, **PATIENT)
    cluster.run(survivor, dead)
    cluster.check(steps=6, survivors=1)
    assert stuck.waited > 0
    assert survivor.vetoes == [3]


def test_the_wait_ends_at_the_push_before_the_abort_has_come_to_the_group(cluster: Cluster) -> None:
    """The abort is held up until backward has returned; the rank knows already that its quorum is over."""
    waiting, returned = threading.Event(), threading.Event()
    held: list[bool] = []

    def die(replica: Replica) -> None:
        waiting.wait(LIMIT_S)
        crash(replica)

    def hold_abort(replica: Replica) -> None:
        stuck(replica)
        group = survivor.group
        abort = group.abort

        def late() -> None:
            held.append(returned.wait(LIMIT_S / 4))
            abort()

        group.abort = late  # type: ignore[method-assign]

    stuck = Stuck(lambda _replica: waiting.set())
    survivor = OnDevice(0, at={(3, "boundary"): hold_abort, (3, "backward"): lambda _: returned.set()}, **PATIENT)
    cluster.run(survivor, OnDevice(1, at={(3, "forward"): die}, **PATIENT))
    cluster.check(steps=6, survivors=1)
    assert held[0]


def test_the_wait_ends_at_an_abort(cluster: Cluster) -> None:
    stuck = Stuck(lambda replica: replica.manager._runtime.shell.communicators.abort())
    first = OnDevice(0, at={(3, "boundary"): stuck}, **PATIENT)
    cluster.run(first, OnDevice(1, **PATIENT))
    cluster.check(steps=6)
    assert stuck.waited > 0
    assert first.vetoes[0] == 3


# ------------------------------------------------------------ what a script computes with


def test_a_grad_scaler_on_each_replica_sees_the_overflow_of_one(cluster: Cluster) -> None:
    found: dict[int, list[float]] = {0: [], 1: []}

    def loop(replica: Replica) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        while replica.manager.current_step() < 4:
            replica.step = step = replica.manager.current_step()
            replica.optimizer.zero_grad()
            loss = replica.loss() * (float("inf") if replica.index == 1 and step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(replica.optimizer)
            state = scaler._per_optimizer_states[id(replica.optimizer)]["found_inf_per_device"]
            found[replica.index].append(sum(float(value) for value in state.values()))
            scaler.step(replica.optimizer)
            scaler.update()
            replica.record(replica.optimizer.committed, participated=True)

    cluster.run(*(OnDevice(index, loop=loop, optim=sgd) for index in (0, 1)))
    cluster.check(steps=4)
    assert found == {0: [0.0, 0.0, 1.0, 0.0], 1: [0.0, 0.0, 1.0, 0.0]}


def test_micro_batches_add_up_to_what_they_do_on_the_cpu(cluster: Cluster) -> None:
    def loop(replica: Replica) -> None:
        while replica.manager.current_step() < 4:
            replica.step = replica.manager.current_step()
            replica.optimizer.zero_grad()
            with replica.ddp.no_sync():  # type: ignore[operator]
                (replica.loss() * 0.25).backward()
            (replica.loss() * 0.75).backward()
            replica.loss().backward()  # a further reduction in the same step
            replica.optimizer.step()
            replica.record(replica.optimizer.committed, participated=True)

    on_device = [OnDevice(index, loop=loop, seed=5) for index in (0, 1)]
    cluster.run(*on_device)
    cluster.run(*(Replica(index, name=f"cpu{index}", loop=loop, seed=5, room_id="cpu") for index in (0, 1)))
    assert [len(r.commits) for r in cluster.replicas] == [4] * 4
    assert {r.commits[-1].digest for r in cluster.replicas} == {on_device[0].commits[-1].digest}


class Averages(OnDevice):
    """Averages a tensor of its own in each step, and waits for it."""

    def iteration(self) -> None:
        self.step = self.manager.current_step()
        self.at("boundary")
        self.optimizer.zero_grad()
        self.loss().backward()
        self.at("backward")
        self.mine = torch.full((3,), float(self.index))
        work = self.manager.allreduce(self.mine)
        work.wait()
        assert work.is_completed()
        self.optimizer.step()
        if self.optimizer.committed:
            self.means.append(self.mine.tolist())
        self.record(self.optimizer.committed, participated=True)

    def train(self) -> None:
        self.means: list[list[float]] = []
        super().train()


def test_what_a_script_averages_is_there_when_the_step_is_committed(cluster: Cluster) -> None:
    replicas = [Averages(index) for index in (0, 1)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    assert [r.means for r in replicas] == [[[0.5] * 3] * 6] * 2


def test_a_step_of_which_a_collective_of_the_scripts_was_cut_short_is_not_applied(cluster: Cluster) -> None:
    """Though the ballots are counted by then, and the script has waited for its work."""

    def spoil(replica: Replica) -> None:
        group = replica.manager._runtime.shell.communicators._beside["users"]
        assert isinstance(group, DeviceGroup)
        aborted = group.aborted

        def at_end(number: int, tensors: list[Tensor]) -> bool:
            if group.aborted is not aborted:
                return group.when_looked_at(number, tensors)
            group.fail(CollectiveError("the script's collective was cut short"))
            return False

        group.at_end = at_end

    spoiled, other = Averages(1, at={(3, "backward"): spoil}), Averages(0)
    cluster.run(other, spoiled)
    cluster.check(steps=6)
    assert spoiled.vetoes[0] == 3
    seen = {tuple(mean) for r in (spoiled, other) for mean in r.means}
    assert seen in ({(0.5,) * 3}, {(0.5,) * 3, (0.0,) * 3}), "zeros: replica 1 heals while the other commits"


def test_a_soft_error_vetoes_for_all(cluster: Cluster) -> None:
    replicas = [OnDevice(0, at={(2, "forward"): soft_error}), OnDevice(1)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    assert [r.vetoes for r in replicas] == [[2], [2]]


# ------------------------------------------------------------ nothing blocks the host

BLOCKING = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "nonzero")


def test_no_number_of_the_device_is_read_past_the_wait(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call that would block the host on a device's tensor, and no copy between it and other memory of the host's."""
    ours: set[int] = set()
    kept: list[Tensor] = []  # so that their addresses stay theirs
    found: list[str] = []

    def on_device(value: object) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in ours

    def own(*tensors: Tensor) -> None:
        kept.extend(tensors)
        ours.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def guard(name: str) -> None:
        real = getattr(Tensor, name)

        def guarded(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if "/ft_core/" in caller:
                mine = on_device(self)
                if name == "copy_":
                    mine = mine != on_device(args[0])
                if mine:
                    found.append(f"{name} in {caller}:{sys._getframe(1).f_lineno}")
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, guarded)

    launch = DeviceGroup._launch

    def launched(self: DeviceGroup, name: str, *arguments: Any) -> Any:
        own(*arguments[0])
        return launch(self, name, *arguments)

    monkeypatch.setattr(DeviceGroup, "_launch", launched)
    for name in (*BLOCKING, "copy_"):
        guard(name)

    def wrap(replica: Replica) -> None:
        replica.wrap()
        reducer: BucketReducer = replica.ddp.gradient_reducer  # type: ignore[assignment]
        own(reducer.buffers._staging, *(bucket.flat for bucket in reducer._buckets))

    cluster.run(*(Averages(index, build=with_unused, optim=sgd, setup=wrap) for index in (0, 1)))
    cluster.check(steps=6)
    assert ours
    assert sorted(set(found)) == []


# ------------------------------------------------------------ settings


def test_where_ballots_travel_is_one_of_two(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Replica(0, fence="gpu")
    cluster.run(wrong)
    assert isinstance(wrong.error, ConfigError)
    assert str(wrong.error) == "fence='gpu' must be one of 'bucket', 'cpu', on all replicas the same"
    monkeypatch.setenv("FT_FENCE", "gpu")
    with pytest.raises(ConfigError, match="FT_FENCE='gpu' must be one of"):
        raise run_alone(cluster, Replica(1))
    monkeypatch.setenv("FT_FENCE", "cpu")
    right = Replica(2, steps=2)
    cluster.run(right, expected=0)
    assert right.error is None
    assert not right.manager._runtime.steps.rides


def run_alone(cluster: Cluster, replica: Replica) -> BaseException:
    cluster.run(replica)
    assert replica.error is not None
    return replica.error


def test_an_abort_reaches_first_the_groups_that_it_ends_at_once(cluster: Cluster) -> None:
    """That of a device may take seconds, which its peers need not wait for on the control group."""
    order: list[str] = []

    def watch(replica: Replica) -> None:
        groups = replica.manager._runtime.shell.communicators
        for name, group in (("gradients", groups.gradients), ("control", groups._beside["control"])):
            group.abort = partial(_noting, order, name, group.abort)  # type: ignore[method-assign]

    cluster.run(OnDevice(0, at={(5, "stepped"): watch}))
    assert order[:2] == ["control", "gradients"]


def _noting(order: list[str], name: str, abort: Callable[[], None]) -> None:
    order.append(name)
    abort()


# ------------------------------------------------------------ a real one


class OnAccelerator(Replica):
    """A replica whose model is on an accelerator, alone: threads of a process share autograd's thread of a device."""

    def wrap(self) -> None:
        device = torch.accelerator.current_accelerator()
        assert device is not None
        self.place = torch.device(device.type, torch.accelerator.current_device_index())
        self.model = self.model.to(self.place)
        self.inner = adamw(self.model)
        self.ddp = DistributedDataParallel(self.manager, self.model, bucket_cap_mb=SMALL_MB)
        self.optimizer = OptimizerWrapper(self.manager, self.inner)

    def loss(self) -> Tensor:
        x, y = batch_of(self.index, self.manager.current_step())
        return nn.functional.cross_entropy(self.ddp(x.to(self.place)), y.to(self.place))

    def digest(self) -> str:
        return digest_of({name: value.cpu() for name, value in self.model.state_dict().items()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.filterwarnings("ignore:gradients on")  # they are copied to the host for Gloo
@pytest.mark.parametrize("fence", ["bucket", "cpu"])
def test_steps_on_an_accelerator_commit(cluster: Cluster, fence: str) -> None:
    replica = OnAccelerator(0, build=with_unused, fence=fence)
    cluster.run(replica)
    cluster.check(steps=6)
    assert isinstance(replica.model, Unused)
    assert replica.model.idle.weight.grad is None
