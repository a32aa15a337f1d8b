"""Elastic data under the Trainer: what several groups train is what one process would on the concatenated batches."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.data.epoch_order import EpochOrder
from tests.lightning import elastic_worker as worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.lightning.forge import Forge

WORKER = pathlib.Path(__file__).with_name("elastic_worker.py")
LIMIT_S = 60.0
IN_GROUPS = ("plain", "global", "global-vetoed")

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def environment(group: int, groups: int, rank: int, ranks: int) -> dict[str, str]:
    named = {
        "FT_REPLICA_GROUP": group, "FT_NUM_REPLICA_GROUPS": groups, "FT_REPLICA_ID": f"r{group}",
        "FT_HOSTNAME": "127.0.0.1", "FT_MIN_REPLICAS": groups, "FT_TIMEOUT_S": 20,
    }  # fmt: skip
    if ranks > 1:
        named |= {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "run",
        }  # fmt: skip
    return {**os.environ, **{name: str(value) for name, value in named.items()}}


@contextlib.contextmanager
def lighthouses(modes: Sequence[str], groups: int) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        words = []
        for mode in modes:
            server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
            stack.callback(server.shutdown)
            words.append(f"{mode}={server.address().removeprefix('http://')}")
        yield words


def train(forge: Forge, folder: pathlib.Path, modes: Sequence[str], groups: int, ranks: int) -> None:
    """All modes, one after another, in as many groups of as many ranks. Results are in the folder."""
    with lighthouses(modes, groups) as words:
        processes = []
        stores = [
            [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in words] for _ in range(groups)
        ]
        for number in range(groups * ranks):
            group, rank = divmod(number, ranks)
            named = [f"{w}#{s.port}" for w, s in zip(words, stores[group], strict=True)] if ranks > 1 else words
            command = [sys.executable, "-u", str(WORKER), str(ranks), str(folder), str(number), *named]
            with (folder / f"{number}.log").open("wb") as log:
                env = environment(group, groups, rank, ranks)
                processes.append(forge.start(command, env, log.fileno(), log.fileno(), cwd=str(folder)))
        try:
            for process in processes:
                process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pass  # the logs say more
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    if any(process.returncode for process in processes):
        raise AssertionError("\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(folder.glob("*.log"))))


@pytest.fixture(scope="module")
def folder(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Three groups of one process have trained all modes."""
    folder = tmp_path_factory.mktemp("elastic")
    train(forge, folder, [*worker.MODES, *worker.EXHAUSTED], 3, 1)
    return folder


@pytest.fixture(scope="module")
def grouped(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two groups of two processes."""
    folder = tmp_path_factory.mktemp("grouped")
    train(forge, folder, IN_GROUPS, 2, 2)
    return folder


def results(folder: pathlib.Path, mode: str) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{mode}.[0-9]"))]


def alone(mode: str, readers: int) -> tuple[dict[str, Any], int, list[float]]:
    """One process on the whole batches: parameters, steps, learning rates."""
    strategy, trainer = worker.MODES[mode]
    each = readers * worker.BATCH * trainer.get("accumulate_grad_batches", 1)
    size, data, net, rates = strategy.get("global_batch_size", each), worker.Samples(), worker.network(), []
    optimizer = torch.optim.SGD(net.parameters(), worker.RATE, worker.MOMENTUM)
    for epoch in range(worker.EPOCHS):
        order = EpochOrder(worker.LENGTH, worker.SEED, epoch, shuffle=True)
        for first in range(0, worker.LENGTH, size):
            chosen = order.indices(((first, min(worker.LENGTH, first + size)),), size)
            optimizer.zero_grad()
            worker.loss_of(net, data.x[chosen], data.y[chosen]).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), worker.CLIP)
            rates.append(worker.RATE)
            if "lr_scaling" in strategy:
                rates[-1] *= (len(chosen) / strategy["reference_batch_size"]) ** 0.5
            optimizer.param_groups[0]["lr"] = rates[-1]
            optimizer.step()
    return net.state_dict(), len(rates), rates


def check(found: list[dict[str, Any]], mode: str) -> None:
    """Equal replicas, equal to one process, each sample once per epoch."""
    expected, steps, rates = alone(mode, len(found))
    for one in found:
        assert one["global_step"] == steps
        assert one["rates"] == pytest.approx(rates)
        for key, value in expected.items():
            torch.testing.assert_close(one["model"][key], found[0]["model"][key], rtol=0, atol=0)
            torch.testing.assert_close(one["model"][key], value, rtol=1e-5, atol=1e-6)
        assert one["lengths"] == found[0]["lengths"]
        assert [last for *_, last in one["lengths"]].count(True) == worker.EPOCHS
    seen = Counter((epoch, index) for one in found for epoch, indices in one["committed"] for index in indices)
    assert seen == Counter((epoch, index) for epoch in range(worker.EPOCHS) for index in range(worker.LENGTH))


@pytest.mark.parametrize("mode", worker.MODES)
def test_three_groups_train_as_one_process(folder: pathlib.Path, mode: str) -> None:
    found = results(folder, mode)
    assert len(found) == 3
    check(found, mode)
    vetoed = {"plain-vetoed": 6, "accumulate-vetoed": 4, "global-vetoed": 4}
    assert found[0]["vetoed"] == vetoed.get(mode, 0)
    if mode in vetoed:  # the same steps, digit for digit
        for key, value in results(folder, mode.removesuffix("-vetoed"))[0]["model"].items():
            torch.testing.assert_close(found[0]["model"][key], value, rtol=0, atol=0)


@pytest.mark.parametrize("mode", IN_GROUPS)
def test_two_groups_of_two_train_as_one_process(grouped: pathlib.Path, mode: str) -> None:
    found = results(grouped, mode)
    assert len(found) == 4
    check(found, mode)


def uneven(epochs: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """One process on the batches of the groups that are named for each step of each epoch."""
    data, net = worker.Samples(), worker.network()
    optimizer = torch.optim.SGD(net.parameters(), worker.RATE, worker.MOMENTUM)
    rate = worker.RATE
    for epoch, steps in enumerate(epochs):
        for step, groups in enumerate(steps):
            optimizer.zero_grad()
            for group in groups:
                at = slice(10 * group + 2 * step, 10 * group + 2 * step + 2)
                (worker.loss_of(net, data.x[at], data.y[at]) / len(groups)).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), worker.CLIP)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            rate *= 0.9 if step % 2 else 1
        rate *= 0.5 if epoch == 0 else 1
    return dict(net.state_dict())


SHADOWED = [[0, 1, 2]] * 3 + [[1, 2], [2]]


@pytest.mark.parametrize(
    ("policy", "group", "epochs"),
    [
        *(("shadow", group, [SHADOWED, SHADOWED]) for group in range(3)),
        *(("stop_all", group, [SHADOWED[:4], SHADOWED[:4]]) for group in range(3)),
        ("leave", 0, [SHADOWED[:3]]),
        ("leave", 1, [SHADOWED[:4]]),
        ("leave", 2, [SHADOWED]),
    ],
)
def test_loaders_that_end_one_after_another(
    folder: pathlib.Path, policy: str, group: int, epochs: list[list[list[int]]]
) -> None:
    """Equal to one process that leaves out whoever has no data."""
    found = results(folder, policy)[group]
    assert found["global_step"] == len(found["rates"]) == sum(map(len, epochs))
    assert [end[:2] for end in found["ends"]] == [
        (epoch, sum(map(len, epochs[: epoch + 1]))) for epoch in range(len(epochs))
    ]
    for key, value in uneven(epochs).items():
        torch.testing.assert_close(found["model"][key], value, rtol=1e-5, atol=1e-6)
    if policy != "leave":
        assert found["ends"] == results(folder, policy)[0]["ends"]
