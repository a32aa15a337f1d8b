"""Accelerate's own test scripts, with the import of Accelerator replaced by ours and one replica group."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import accelerate
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = pathlib.Path(accelerate.__file__).parent / "test_utils" / "scripts"
LIMIT_S = 120.0
IMPORT = re.compile(r"^from accelerate(\.accelerator)? import (.*\bAccelerator\b.*)$", re.MULTILINE)

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops"])
def test_a_script_of_accelerate_passes(name: str, ranks: int, tmp_path: pathlib.Path) -> None:
    ours = "\nfrom ft_accelerate import FaultTolerantAccelerator as Accelerator"
    source, replaced = IMPORT.subn(lambda found: found[0] + ours, (SCRIPTS / f"{name}.py").read_text())
    assert replaced == (0 if name == "test_ops" else 1)  # that one needs no Accelerator
    script = tmp_path / f"{name}.py"
    script.write_text(source)
    launcher = ["-m", "ft_core.launch", "--replicas", "1", "--nproc-per-replica", str(ranks), "--max-restarts", "0"]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if ranks == 1:  # as a process that nobody launched: with LOCAL_RANK Accelerate expects several
        launcher = ["-c", LONE]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


LONE = """
import os, runpy, sys
from ft_core.lighthouse import LighthouseServer
house = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=50)
os.environ |= {"FT_LIGHTHOUSE": house.address().removeprefix("http://"), "FT_HOSTNAME": "127.0.0.1"}
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    house.shutdown()
"""
"""Runs a script beside a lighthouse."""
