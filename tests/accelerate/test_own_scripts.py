"""Accelerate's own test scripts, with the import of Accelerator replaced by ours and one replica group."""

from __future__ import annotations

import pathlib
import re
from typing import TYPE_CHECKING

import accelerate
import pytest

from ft_core.control.lighthouse.server import LighthouseServer
from tests.accelerate.processes import outputs
from tests.launch.job import job

if TYPE_CHECKING:
    from tests.forge import Forge

SCRIPTS = pathlib.Path(accelerate.__file__).parent / "test_utils" / "scripts"
LIMIT_S = 60.0
IMPORT = re.compile(r"^from accelerate(\.accelerator)? import (.*\bAccelerator\b.*)$", re.MULTILINE)
OURS = "\nfrom ft_accelerate import FaultTolerantAccelerator as Accelerator"

pytestmark = [pytest.mark.process, pytest.mark.timeout(100)]


def ours(name: str, folder: pathlib.Path) -> pathlib.Path:
    """The script with the other import."""
    source, replaced = IMPORT.subn(lambda found: found[0] + OURS, (SCRIPTS / f"{name}.py").read_text())
    assert replaced == (0 if name == "test_ops" else 1)  # that one needs no Accelerator
    script = folder / f"{name}.py"
    script.write_text(source)
    return script


@pytest.mark.parametrize("name", ["test_script", "test_sync"])
def test_a_script_of_accelerate_passes_in_a_process_that_nobody_launched(
    name: str, tmp_path: pathlib.Path, forge: Forge
) -> None:
    house = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=50)
    env = {"FT_LIGHTHOUSE": house.address().removeprefix("http://"), "FT_HOSTNAME": "127.0.0.1"}
    try:  # without LOCAL_RANK: with it Accelerate expects several
        outputs(forge, tmp_path, ours(name, tmp_path), [([], env)], LIMIT_S)
    finally:
        house.shutdown()


@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops"])
@pytest.mark.usefixtures("forged_workers")
def test_a_script_of_accelerate_passes_in_a_group_of_two(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    options = ("--replicas", "1", "--nproc-per-replica", "2", "--max-restarts", "0")
    with job(ours(name, tmp_path), *options) as running:
        assert running.run() == 0, running.text
