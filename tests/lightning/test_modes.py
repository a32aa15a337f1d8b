"""Every mode of optimization: equal to plain DDP without faults, digit for digit; equal replicas with faults."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from ft_core.control.lighthouse.server import LighthouseServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.lightning.forge import Forge, Forged

WORKER = pathlib.Path(__file__).with_name("modes_worker.py")
LIMIT_S = 150.0
MODES: tuple[str, ...] = (
    "automatic", "epochs", "plateau", "accumulate", "scheduled", "bf16", "fp16", "swa", "ema", "manual", "two",
    "two-fp16", "alternating", "gan", "gan-closures", "untoggled",
)  # fmt: skip
FAULTY: tuple[str, ...] = (
    *(f"{mode}-vetoed" for mode in (
        "automatic", "plateau", "accumulate", "fp16", "ema", "manual", "two", "alternating", "gan")),
    *(f"{mode}-broken" for mode in ("automatic", "two", "alternating", "gan", "gan-closures")),
    "none", "none-fp16", "none-accumulate",
)  # fmt: skip
if importlib.util.find_spec("lightning.pytorch.callbacks.weight_averaging") is None:  # Lightning 2.5
    MODES, FAULTY = (tuple(name for name in names if not name.startswith("ema")) for names in (MODES, FAULTY))
LONG = {
    "plateau", "scheduled", "bf16", "two-fp16", "gan", "automatic-vetoed", "manual-vetoed", "gan-vetoed", "two-broken",
    "alternating-broken", "none-fp16",
}  # fmt: skip
"""What is looked at by scripts/check-long only: the parts of each are in others."""
QUICK_MODES, QUICK_FAULTY = ([name for name in names if name not in LONG] for names in (MODES, FAULTY))
LONG_MODES, LONG_FAULTY = ([name for name in names if name in LONG] for names in (MODES, FAULTY))
IN_GROUPS = ("automatic", "accumulate", "manual", "gan")

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def start(
    forge: Forge, name: str, devices: int, folder: pathlib.Path, rank: int, words: Sequence[str], env: Mapping[str, str]
) -> Forged:
    command = [sys.executable, "-u", str(WORKER), name, str(devices), str(folder), str(rank), *words]
    with (folder / f"{name}.{rank}.log").open("wb") as log:
        return forge.start(command, {**os.environ, **env}, log.fileno(), log.fileno(), cwd=str(folder))


def elastic(rank: int, size: int) -> dict[str, str]:
    """What torchrun sets; the port comes with each mode."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "run",
    }  # fmt: skip


def in_group(number: int) -> dict[str, str]:
    return {
        "FT_REPLICA_GROUP": str(number), "FT_NUM_REPLICA_GROUPS": "2", "FT_REPLICA_ID": f"r{number}",
        "FT_HOSTNAME": "127.0.0.1", "FT_MIN_REPLICAS": "2", "FT_TIMEOUT_S": "20",
    }  # fmt: skip


def met(words: Sequence[str]) -> tuple[list[str], list[TCPStore]]:
    """`mode=address#port` for each: a store per run, held by this process, as an elastic agent would.

    Not a free port for rank 0 to listen on: between two runs somebody's connection may take it.
    """
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in words]
    named = [word if "=" in word else f"{word}=" for word in words]
    return [f"{word}#{store.port}" for word, store in zip(named, stores, strict=True)], stores


@contextlib.contextmanager
def lighthouses(modes: Sequence[str]) -> Iterator[list[str]]:
    """`mode=address` for each: a lighthouse's room is closed when a run has ended."""
    with contextlib.ExitStack() as stack:
        words = []
        for mode in modes:
            server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
            stack.callback(server.shutdown)
            words.append(f"{mode}={server.address().removeprefix('http://')}")
        yield words


def wait(processes: Sequence[Forged], folder: pathlib.Path) -> None:
    """Until all have ended well."""
    try:
        for process in processes:
            process.wait(LIMIT_S)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))
        raise AssertionError(f"{[process.returncode for process in processes]}\n{logs}")


def trained(forge: Forge, folder: pathlib.Path, modes: Sequence[str], faulty: Sequence[str]) -> pathlib.Path:
    """Two groups of one process and two processes of DDP have trained these modes."""
    plain, _stores = met(modes)
    with lighthouses((*modes, *faulty)) as words:
        wait(
            [start(forge, "ddp", 2, folder, rank, plain, elastic(rank, 2)) for rank in range(2)]
            + [start(forge, "fault_tolerant", 1, folder, group, words, in_group(group)) for group in range(2)],
            folder,
        )
    return folder


@pytest.fixture(scope="module")
def folder(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return trained(forge, tmp_path_factory.mktemp("modes"), QUICK_MODES, QUICK_FAULTY)


@pytest.fixture(scope="module")
def long_folder(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return trained(forge, tmp_path_factory.mktemp("long-modes"), LONG_MODES, LONG_FAULTY)


def result(folder: pathlib.Path, mode: str, name: str, rank: int) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"{mode}.{name}.{rank}", weights_only=False)
    return loaded


def assert_same(a: Any, b: Any, where: str = "", rtol: float = 0.0, skip: Sequence[str] = ()) -> None:
    """Equal structures with equal numbers."""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, msg=lambda text: f"{where}: {text}")
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            if key not in skip:
                assert_same(a[key], b[key], f"{where}.{key}", rtol, skip)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]", rtol, skip)
    else:
        assert a == b, f"{where}: {a} != {b}"


COUNTS = ("committed", "vetoed")


@pytest.mark.parametrize("mode", QUICK_MODES)
def test_two_groups_equal_plain_ddp_digit_for_digit(folder: pathlib.Path, mode: str) -> None:
    check_equal(folder, mode)


@pytest.mark.long
@pytest.mark.parametrize("mode", LONG_MODES)
def test_two_groups_equal_plain_ddp_in_more_modes(long_folder: pathlib.Path, mode: str) -> None:
    check_equal(long_folder, mode)


def check_equal(folder: pathlib.Path, mode: str) -> None:
    ddp, mine, other = result(folder, mode, "ddp", 0), *(result(folder, mode, "fault_tolerant", g) for g in range(2))
    assert_same(mine, ddp, mode, skip=COUNTS)
    assert_same(mine, other, mode)
    assert mine["vetoed"] == 0
    assert mine["committed"] == mine["global_step"] > 0


@pytest.mark.parametrize("mode", QUICK_FAULTY)
def test_replicas_stay_equal_and_count_commits_only(folder: pathlib.Path, mode: str) -> None:
    check_commits(folder, mode)


@pytest.mark.long
@pytest.mark.parametrize("mode", LONG_FAULTY)
def test_replicas_stay_equal_in_more_modes(long_folder: pathlib.Path, mode: str) -> None:
    check_commits(long_folder, mode)


def check_commits(folder: pathlib.Path, mode: str) -> None:
    mine, other = (result(folder, mode, "fault_tolerant", group) for group in range(2))
    assert_same(mine, other, mode)
    assert mine["committed"] == mine["global_step"] > 0
    automatic = len(mine["optimizers"]) == 1 and not mode.startswith("manual")
    if automatic and mine["schedulers"] and "last_epoch" in mine["schedulers"][0] and "accumulate" not in mode:
        assert mine["schedulers"][0]["last_epoch"] == mine["global_step"]
    # Two epochs of 10 batches; vetoes in batches 1, 4 and 8 (windows of 4: in 1 and 8), broken quorums in 1 and 5.
    expected = {
        "automatic-vetoed": 6, "plateau-vetoed": 6, "fp16-vetoed": 6, "ema-vetoed": 6, "accumulate-vetoed": 4,
        "manual-vetoed": 6, "two-vetoed": 12, "alternating-vetoed": 6, "gan-vetoed": 6,
        "automatic-broken": 2, "two-broken": 4, "gan-broken": 6, "gan-closures-broken": 6,
        "none": 0, "none-fp16": 0, "none-accumulate": 0,
    }  # fmt: skip
    if mode in expected:
        assert mine["vetoed"] == expected[mode]


def test_two_groups_of_two_equal_four_processes_of_ddp(forge: Forge, tmp_path: pathlib.Path) -> None:
    together, _stores = met(IN_GROUPS)
    with lighthouses(IN_GROUPS) as words:
        inside = [met(words) for _ in range(2)]
        groups = [
            start(forge, "fault_tolerant", 2, tmp_path, 2 * group + rank, inside[group][0],
                  {**elastic(rank, 2), **in_group(group)})
            for group in range(2) for rank in range(2)
        ]  # fmt: skip
        plain = [start(forge, "ddp", 4, tmp_path, rank, together, elastic(rank, 4)) for rank in range(4)]
        wait([*groups, *plain], tmp_path)
    for mode in IN_GROUPS:
        ddp, *ours = result(tmp_path, mode, "ddp", 0), *(result(tmp_path, mode, "fault_tolerant", r) for r in range(4))
        for other in ours:
            assert_same(ours[0], other, mode)
            assert_same(other, ddp, mode, rtol=1e-5, skip=(*COUNTS, "notes"))
