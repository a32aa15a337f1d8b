"""Two groups of two ranks end with the bits of torch's HSDP over the same four processes, in every mode."""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.fsdp.modes import MODES
from tests.launch.job import job

if TYPE_CHECKING:
    from tests.forge import Forge

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
ROOT = pathlib.Path(__file__).resolve().parents[2]
Digests = dict[tuple[str, int, int], str]
LIMIT_S = 180.0


def read(text: str) -> Digests:
    found = (json.loads(line) for line in re.findall(r"DIGEST (\[[^\]]*\])", text))
    return {(name, group, rank): digest for name, group, rank, digest in found}


LONG = {
    "fp32", "accumulate whole", "two roots", "compiled whole", "no reshard", "recompute", "momentum", "compiled blocks",
    "offload",
}  # fmt: skip
"""Modes that are looked at by scripts/check-long only. What "clip" does contains "fp32"."""
QUICK = [mode for mode in MODES if mode not in LONG]


def native(forge: Forge, modes: list[str]) -> Digests:
    words = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    words += ["-m", "tests.fsdp.modes", "native", *(mode.replace(" ", "_") for mode in modes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        torchrun = forge.start(words, env, out.fileno(), err.fileno(), str(ROOT), launches=True)
        try:
            status = torchrun.wait(LIMIT_S)
        finally:
            torchrun.kill()
        for file in (out, err):
            file.seek(0)
        assert status == 0, err.read()
        return read(out.read())


def both(forge: Forge, modes: list[str]) -> tuple[Digests, Digests]:
    """Torch's, and ours."""
    names = " ".join(mode.replace(" ", "_") for mode in modes)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool, forge.serves_ftrun():
        patch.setenv("PYTHONPATH", str(ROOT))
        theirs = pool.submit(native, forge, modes)
        with job(f"{ROOT / 'tests/fsdp/modes.py'} ours {names}", "--replicas", "2", "--nproc-per-replica", "2") as run:
            assert run.run() == 0, run.text
        return theirs.result(), read(run.text)


@pytest.fixture(scope="module")
def quick(forge_of_a_file: Forge) -> tuple[Digests, Digests]:
    return both(forge_of_a_file, QUICK)


@pytest.fixture(scope="module")
def others(forge_of_a_file: Forge) -> tuple[Digests, Digests]:
    return both(forge_of_a_file, sorted(LONG))


@pytest.mark.parametrize("mode", QUICK)
def test_equal_to_hsdp(quick: tuple[Digests, Digests], mode: str) -> None:
    compare(quick, mode)


@pytest.mark.long
@pytest.mark.parametrize("mode", sorted(LONG))
def test_equal_to_hsdp_in_more_modes(others: tuple[Digests, Digests], mode: str) -> None:
    compare(others, mode)


def compare(digests: tuple[Digests, Digests], mode: str) -> None:
    theirs, ours = ({key: value for key, value in found.items() if key[0] == mode} for found in digests)
    assert len(theirs) == 4
    if mode == "bf16 reduced in bf16":  # torch sums over the groups in bfloat16, the ring in float32
        assert ours != theirs
        assert len({(rank, digest) for (_, _, rank), digest in ours.items()}) == 2, "all groups hold the same"
        return
    assert ours == theirs
