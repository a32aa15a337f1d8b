"""With a group of devices for the gradients, nothing in CPU memory travels over it; and how that group is chosen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

from ft_core import DistributedDataParallel, Manager
from ft_core.backends import TorchBuild
from ft_core.errors import ConfigError
from ft_core.process_group import ByDevice, default
from ft_core.protocol.rank.heal_plan import WorldSizeMode
from ft_core.runtime.communicators import Communicators
from tests import device_only
from tests.device_only import CARRIED, REFUSED, DeviceOnly
from tests.loop.looped import Looped
from tests.process_group.ranks import in_threads
from tests.runtime.harness import LIMIT_S, Cluster, Replica, crash, soft_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import TCPStore


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FT_BACKEND", raising=False)
    monkeypatch.setenv("FT_HOSTNAME", "127.0.0.1")
    device_only.take_over(monkeypatch.setattr)
    for kept in (REFUSED, CARRIED, device_only.DEVICE_MEMORY):
        kept.clear()


def by_device() -> Any:
    return ByDevice()


def nothing_refused() -> None:
    assert REFUSED == []
    assert len(CARRIED) > 10


def both(cluster: Cluster, make: Callable[[int], Replica] | None = None, **options: Any) -> list[Replica]:
    replicas = [make(i) if make else Replica(i, pg=by_device, **options) for i in range(2)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    nothing_refused()
    for replica in replicas:
        assert isinstance(replica.manager._runtime.shell.communicators.gradients, DeviceOnly)
    return replicas


def test_steps_vote_and_end_without_cpu_memory(cluster: Cluster) -> None:
    both(cluster)
    assert set(CARRIED) == {"allreduce"}, "messages of those that part are no matter of the device"


def test_what_a_script_reduces_in_cpu_memory_goes_beside_it(cluster: Cluster) -> None:
    sums: list[float] = []

    def act(replica: Replica) -> None:
        for operation in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            tensor = torch.ones(3)
            replica.manager.allreduce(tensor, reduce_op=operation).wait()
            sums.append(float(tensor[0]))

    both(cluster, lambda i: Replica(i, pg=by_device, at={(2, "backward"): act}))
    assert sorted(sums) == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


def test_vetoes_heals_digests_and_the_leaders_announcements_go_beside_it(cluster: Cluster) -> None:
    """A soft error, a death, a newcomer that is healed, parity of the whole state, and a quorum of one."""
    late = Replica(2, pg=by_device, parity_check_every=1)
    one = Replica(0, pg=by_device, parity_check_every=1, steps=12, at={(2, "backward"): soft_error})
    two = Replica(1, pg=by_device, parity_check_every=1, steps=12, at={(4, "boundary"): crash})
    late.steps = 12
    one.actions[6, "boundary"] = cluster.joins(late)
    cluster.run(one, two, expected=2)
    cluster.check(steps=12, survivors=2)
    assert late.commits[0].step > 1
    nothing_refused()


def test_models_without_a_reducer_and_two_models_vote_beside_it(cluster: Cluster) -> None:
    class Two(Replica):
        """A second model: no ballot rides."""

        def wrap(self) -> None:
            super().wrap()
            self.other = DistributedDataParallel(self.manager, nn.Linear(2, 1))

        def loss(self) -> torch.Tensor:
            count = torch.ones(1)
            self.manager.allreduce(count, reduce_op=ReduceOp.SUM).wait()
            assert int(count) == self.manager.num_participants()
            loss: torch.Tensor = super().loss() + self.other(torch.ones(1, 2)).sum()
            return loss

    both(cluster, lambda i: Two(i, pg=by_device))


def test_the_loops_window_leader_and_publisher_go_beside_it(cluster: Cluster) -> None:
    disk: list[str] = []
    replicas = [Looped(i, disk, pg=by_device) for i in range(2)]
    cluster.run(*replicas)
    cluster.check(steps=6)
    nothing_refused()
    assert disk


def test_spares_and_uneven_ends_go_beside_it(cluster: Cluster) -> None:
    both(cluster, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES, min_replica_size=1)


def test_members_that_part_send_their_messages_beside_it(store: TCPStore) -> None:
    """Each waits until the other parts, too (R16): at once, if the messages arrive."""
    ranks = [Communicators(DeviceOnly()) for _ in range(2)]

    def part(index: int) -> float:
        communicators = ranks[index]
        communicators.open(1)
        communicators.configure(f"127.0.0.1:{store.port}/parting", f"r{index}", index, 2, rides=True)
        began = time.monotonic()
        communicators.linger(LIMIT_S)
        return time.monotonic() - began

    took = in_threads(2, part)
    for communicators in ranks:
        communicators.shutdown()
    assert REFUSED == []
    assert max(took) < LIMIT_S / 2


def test_the_group_refuses_what_is_not_in_a_bucket() -> None:
    group = DeviceOnly()
    with pytest.raises(RuntimeError, match=r"no CPU memory: allreduce of \(2,\) torch.float32"):
        group.allreduce(torch.ones(2))
    assert REFUSED == ["allreduce of (2,) torch.float32"]
    group.shutdown()


# ---------------------------------------------------------------------------------------------------- how it is chosen

EIGHT = TorchBuild("2.13.0+cu130", cuda="13.0", nccl=True, cuda_devices=8)


def refused_at_wrap(cluster: Cluster, model: Callable[[], nn.Module], **options: Any) -> str:
    replica = Replica(0, build=model, **options)
    cluster.run(replica)
    replica.manager.shutdown()
    assert isinstance(replica.error, ConfigError)
    return str(replica.error)


def test_a_model_that_the_given_group_cannot_carry_is_refused_when_it_is_wrapped(cluster: Cluster) -> None:
    class Nccl(DeviceOnly):
        @property
        def torch_backend(self) -> str:
            return "nccl"

    said = refused_at_wrap(cluster, lambda: nn.Linear(6, 3), pg=Nccl)
    assert said.startswith(
        "pg=Nccl(): the model is on cpu, and nccl works on cuda devices only: move it with model.to("
    )
    assert said.endswith("leave out pg=Nccl(): then the device decides")


def test_ft_backend_that_cannot_be_is_refused_when_the_model_is_wrapped(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_BACKEND", "nccl")
    monkeypatch.setattr(default, "torch_build", lambda: TorchBuild("2.13.0+cpu"))
    with pytest.raises(ConfigError) as found:  # the Manager looks at it when it is made
        by_device().check_build()
    said = str(found.value)
    assert said.startswith("FT_BACKEND=nccl: torch 2.13.0+cpu is built without CUDA: install a CUDA build of it")
    monkeypatch.setattr(default, "torch_build", lambda: EIGHT)
    said = refused_at_wrap(Cluster(cluster.lighthouse), lambda: nn.Linear(6, 3), pg=by_device)
    assert said.startswith("FT_BACKEND=nccl: the model is on cpu, and nccl works on cuda devices only")


def test_a_wrong_name_is_refused_by_the_manager(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_BACKEND", "ncll")
    with pytest.raises(ConfigError, match=r"FT_BACKEND='ncll': unknown; did you mean nccl\?"):
        Manager(lighthouse_addr="127.0.0.1:1")


def test_a_manager_without_a_group_is_told_which_by_its_model(cluster: Cluster) -> None:
    class None_(Replica):
        def make_manager(self) -> Manager:
            return Manager(
                min_replica_size=1, lighthouse_addr="localhost:1", hostname="127.0.0.1", replica_id=self.name,
                expected_replicas=self.cluster.expected,
                load_state_dict=lambda state: self.load_state_dict(state), state_dict=lambda: self.state_dict(),
            )  # fmt: skip

        def wrap(self) -> None:
            communicators = self.manager._runtime.shell.communicators
            assert communicators.backend == ""
            assert "ByDevice" in repr(communicators)
            super().wrap()
            first = communicators.gradients
            assert isinstance(first, DeviceOnly)
            self.manager.hooks.unregister_reducer(self.ddp.gradient_reducer)  # type: ignore[arg-type]
            self.manager.hooks.register_reducer(self.ddp.gradient_reducer)  # type: ignore[arg-type]
            assert communicators.gradients is first, "the same devices, the same group"

    cluster.run(None_(0), None_(1))
    cluster.check(steps=6)
    nothing_refused()


def test_anything_else_is_no_group(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"pg must be an ft_core.process_group.ProcessGroup, got str"):
        Manager(pg="gloo", lighthouse_addr="localhost:1")  # type: ignore[arg-type]
