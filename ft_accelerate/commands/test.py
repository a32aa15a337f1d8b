"""`ft-accelerate test`: tries this machine and this config file before a long job does.

How it works. Two jobs are run with `ft-accelerate launch`. The first is the sanity script of `accelerate test`, its
import of Accelerator changed to ours, in one replica group. The second trains in several groups, one of which is killed
and comes back (`exercise`); afterwards all must have the same number of steps and, to the bit, the same model.

Threads: the main one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ft_accelerate._compat.launch import path_in_accelerate_package
from ft_accelerate.commands.exercise import VICTIM
from ft_accelerate.yaml_config import find
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

IMPORT = "from accelerate import Accelerator\n"
OURS = "from ft_accelerate import FaultTolerantAccelerator as Accelerator\n"
GROUPS = 2


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0 if both jobs went well.

    Raises:
        ConfigError: the config file cannot work.
    """
    parser = argparse.ArgumentParser(
        prog="ft-accelerate test", description="Runs accelerate's sanity script, then trains and kills a replica group."
    )
    parser.add_argument("--config_file", "--config-file", help="the file to try")
    document = find(parser.parse_args(list(argv)).config_file)
    if document.section.get("enabled") is False:
        raise ConfigError(
            f"enabled: false in {document.path}: there is nothing to try; `accelerate test` tries the rest"
        )
    groups = max(GROUPS, int(str(document.section.get("replicas", GROUPS)).partition(":")[0]))
    options = ["--config_file", document.path] if document.path else []
    with tempfile.TemporaryDirectory(prefix="ft_accelerate.") as folder:
        for what, run in (("accelerate's sanity script", sanity), ("training with a kill", exercise)):
            print(f"ft-accelerate test: {what}", flush=True)
            why = run(options, Path(folder), groups)
            if why:
                print(f"ft-accelerate test: {what} failed: {why}", file=sys.stderr)
                return 1
    print("Test is a success! You are ready for your fault-tolerant training!")
    return 0


def sanity(options: Sequence[str], folder: Path, groups: int) -> str:
    """Run accelerate's script in one group. Returns what went wrong, "" if nothing did."""
    del groups
    script = folder / "accelerate_test_script.py"
    script.write_text(ours(Path(path_in_accelerate_package("test_utils", "scripts", "test_script.py")).read_text()))
    status = _launch([*options, "--ft_replicas=1", "--ft_min_replicas=1", "--ft_max_restarts=0", str(script)])
    return f"exit status {status}" if status else ""


def ours(script: str) -> str:
    """A script of accelerate's with our Accelerator.

    Raises:
        ConfigError: it does not import Accelerator where it used to.
    """
    if IMPORT not in script:
        raise ConfigError("the sanity script of the installed accelerate is not known to this version of ft-accelerate")
    return script.replace(IMPORT, OURS)


def exercise(options: Sequence[str], folder: Path, groups: int) -> str:
    """Train with a kill. Returns what went wrong, "" if nothing did."""
    began = time.monotonic()
    words = [f"--ft_replicas={groups}", "--ft_min_replicas=1", "--ft_max_restarts=3"]
    status = _launch([*options, *words, "--module", "ft_accelerate.commands.exercise", str(folder)])
    if status:
        return f"exit status {status}"
    why, ends = judge(folder, groups)
    if not why:
        print(
            f"ft-accelerate test: replica group {VICTIM} was killed and came back; {len(ends)} processes ended with "
            f"the same model after {ends[0]['steps']} steps, {time.monotonic() - began:.1f} s"
        )
    return why


def judge(folder: Path, groups: int) -> tuple[str, list[dict[str, object]]]:
    """The errors in the results that the processes left in `folder`, and the results."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))}
    missing = [str(group) for group in range(groups) if not any(name.startswith(f"{group}-") for name in found)]
    if missing:
        return f"replica group {', '.join(missing)} did not finish", []
    if not (folder / "killed").exists():
        return f"replica group {VICTIM} was not killed", []
    ends = list(found.values())
    if any(end != ends[0] for end in ends):
        return "the processes ended with different models: " + json.dumps(found), ends
    return "", ends


def _launch(words: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "ft_accelerate", "launch", *words], check=False).returncode
