"""Accelerate's own unit tests, with the import of Accelerator replaced by ours and one replica group.

The installed version's source distribution comes from the package index once, into `.cache`. scripts/check-long runs
the files in `SOON`; with FT_ACCELERATE_ALL=1 (scripts/check-accelerate-matrix) all in `FILES` are run.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tarfile
from xml.etree import ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = importlib.metadata.version("accelerate")
CACHE = ROOT / ".cache" / "accelerate-tests"
FILES = ("test_scheduler", "test_optimizer", "test_state_checkpointing", "test_accelerator")
SOON = FILES[1:3]
"""A few seconds; the rest takes a minute."""
EVERYTHING = os.environ.get("FT_ACCELERATE_ALL") == "1"
LIMIT_S = 500.0
PASSED = {("1.15.0", True): 68, ("1.15.0", False): 17, ("1.10.0", False): 17}
"""By version, and whether all were run. Parametrized tests count each."""
IMPORT = re.compile(r"^from accelerate(\.accelerator)? import (.*\bAccelerator\b.*)$", re.MULTILINE)
OURS = "\nfrom ft_accelerate import FaultTolerantAccelerator as Accelerator"
"""What is put after that line: it is the whole change."""
HARDWARE = (
    "test is slow",  # those of bitsandbytes on GPUs, all of them
    "test requires a GPU", "test requires a CUDA GPU or XPU", "test requires multiple hardware accelerators",
    "test requires multiple GPUs", "test requires FP8 support", "test requires the bitsandbytes library",
    "test requires the Hugging Face suite", "test requires transformers engine", "test requires torchao",
)  # fmt: skip
"""Of Accelerate's own reasons for a skip, those that speak of what this machine does not have."""
CONFTEST = '''
"""A lighthouse for all tests of this process, as a process: the tests fork."""
import os, subprocess, sys
import pytest

_house = subprocess.Popen(
    [sys.executable, "-m", "ft_core.lighthouse", "--bind", "127.0.0.1:0", "--min-replicas", "1"],
    stdout=subprocess.PIPE, text=True,
)
os.environ["FT_LIGHTHOUSE"] = _house.stdout.readline().partition("listens on ")[2].strip()


@pytest.fixture(autouse=True, scope="session")
def _end():
    yield
    _house.kill()
    _house.communicate()
'''

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(LIMIT_S + 100)]


def source() -> pathlib.Path:
    """The archive, from the index if it is not here."""
    path = CACHE / f"accelerate-{VERSION}.tar.gz"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "accelerate"]
        done = subprocess.run(
            [*command, "--dest", str(CACHE), f"accelerate=={VERSION}"], capture_output=True, text=True, timeout=LIMIT_S
        )  # fmt: skip
        assert path.exists(), f"accelerate {VERSION} could not be got from the package index:\n{done.stderr}"
    return path


def needed() -> pathlib.Path:
    """A folder with the one package that the tests import and Accelerate does not require."""
    folder = CACHE / "site"
    if not (folder / "parameterized").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        done = subprocess.run([*command, "parameterized"], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, f"parameterized could not be got from the package index:\n{done.stderr}"
    return folder


def rewritten(folder: pathlib.Path, name: str) -> None:
    """One test file with the other import."""
    with tarfile.open(source()) as archive:
        file = archive.extractfile(f"accelerate-{VERSION}/tests/{name}.py")
        assert file is not None
        text, replaced = IMPORT.subn(lambda found: found[0] + OURS, file.read().decode())
    assert replaced == 1, name
    (folder / f"{name}.py").write_text(text)


def test_accelerates_unit_tests_pass_with_the_import_changed(tmp_path: pathlib.Path) -> None:
    names = FILES if EVERYTHING else SOON
    for name in names:
        rewritten(tmp_path, name)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    env = {name: text for name, text in os.environ.items() if not name.startswith(("FT_", "ACCELERATE_", "PYTEST_"))}
    env |= {"FT_HOSTNAME": "127.0.0.1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = f"{ROOT}:{needed()}"
    report = tmp_path / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"{name}.py" for name in names)],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    skips = [found.get("message", "") for case in cases for found in case.iter("skipped")]
    assert [reason for reason in skips if reason not in HARDWARE] == []
    known = PASSED.get((VERSION, EVERYTHING))
    assert known is not None, f"PASSED does not know accelerate {VERSION}: {len(cases) - len(skips)} of {len(cases)}"
    assert len(cases) - len(skips) == known, done.stdout[-2000:]
