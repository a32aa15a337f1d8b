"""`ft-accelerate launch`: what it decides, and real jobs of small scripts that show what their processes were told."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from accelerate.test_utils import path_in_accelerate_package

from ft_accelerate.commands import launch, main
from ft_accelerate.commands import test as trial
from ft_accelerate.launch_options import Given, exported, ftrun_options, in_our_words, resolve
from ft_accelerate.options import OPTIONS
from ft_accelerate.yaml_config import Document, find
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HEAD = "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: 'no'\nuse_cpu: true\nfault_tolerance_config:\n"
SHOW = """
import json, os, sys
from pathlib import Path
me = Path(sys.argv[1]) / f"{os.environ['FT_REPLICA_GROUP']}-{os.environ['RANK']}"
lives = int(me.read_text().count('{')) if me.exists() else 0
with open(me, "a") as file:
    file.write(json.dumps({"env": dict(os.environ), "argv": sys.argv[2:]}) + "\\n")
if me.name == "1-0" and not lives:
    sys.exit(3)  # dies once: the group is started again
"""


def given(
    flags: Mapping[str, str], section: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
) -> dict[str, Given]:
    return resolve(flags, section or {}, env or {}, {})


def parsed(*words: str) -> Any:
    return launch.parser().parse_args([*words, "train.py"])


# ---------------------------------------------------------------- where a value comes from


def test_command_line_over_yaml_over_environment_over_default() -> None:
    env = {"ACCELERATE_FT_STANDBY": "1", "ACCELERATE_FT_MAX_RETRIES": "5"}
    found = given({"standby": "3"}, {"standby": 2, "min_replicas": 2}, env)
    assert found["standby"] == Given(3, "--ft_standby")
    assert found["min_replicas"] == Given(2, "fault_tolerance_config.min_replicas")
    assert found["max_retries"] == Given(5, "ACCELERATE_FT_MAX_RETRIES")
    assert "chaos" not in found
    assert given({}, {"standby": 2}, env)["standby"].value == 2
    assert given({}, {}, env)["standby"].value == 1


def test_one_group_or_several_here_is_what_was_said_closest_at_hand() -> None:
    several = {"replicas": "2", "replica_offset": 4}
    assert set(given({"replica_group": "1"}, several)) == {"replica_group"}
    assert set(given({"replicas": "2"}, {"replica_group": 1})) == {"replicas"}
    assert set(given({}, several, {"ACCELERATE_FT_REPLICA_GROUP": "1"})) == set(several)
    assert set(given({"replicas": "2", "replica_group": "1"})) == {"replicas", "replica_group"}  # ftrun refuses it


def test_what_ftrun_has_no_option_for_is_told_by_environment_and_nothing_twice() -> None:
    env = {"ACCELERATE_FT_REPLICA_GROUP": "1", "ACCELERATE_FT_LIGHTHOUSE": "h:1", "ACCELERATE_FT_REPLICAS": "2",
           "ACCELERATE_FT_MAX_RETRIES": "5", "PATH": "/bin"}  # fmt: skip
    found = given({"quorum_timeout_s": "8", "timeout_s": "2.5"}, {}, env)
    assert exported(found, env) == {
        "PATH": "/bin", "ACCELERATE_FT_QUORUM_TIMEOUT_S": "8", "ACCELERATE_FT_MAX_RETRIES": "5",
        "ACCELERATE_FT_ENABLED": "true",
    }  # fmt: skip
    assert ftrun_options(found) == ["--replicas=2", "--lighthouse=h:1", "--replica=1", "--timeout=2.5"]


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        ({"min_replicas": "many"}, {}, "--ft_min_replicas='many' must be a whole number"),
        ({"lighthouse": "nowhere"}, {}, "--ft_lighthouse='nowhere': expected host:port"),
        ({"chaos": "kil=3s"}, {}, "--ft_chaos 'kil=3s': unknown kind 'kil'"),
        ({}, {"ACCELERATE_FT_STANDBY": "x"}, "ACCELERATE_FT_STANDBY='x' must be a whole number"),
        ({}, {"ACCELERATE_FT_MINREPLICAS": "2"}, "ACCELERATE_FT_MINREPLICAS is not known to ft-accelerate; did "
         "you mean ACCELERATE_FT_MIN_REPLICAS"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_work_names_its_place(flags: dict[str, str], env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        given(flags, {}, env)


def test_every_option_is_a_flag_in_both_spellings_and_accelerates_own_ones_count() -> None:
    for name in OPTIONS:
        assert vars(parsed(f"--ft_{name}=v"))[f"ft_{name}"] == "v"
    assert parsed("--ft-min-replicas", "2").ft_min_replicas == "2"
    args = parsed("--max_restarts", "4", "--role", "worker")
    found = launch.settings(args, find(None), {})
    assert (found["max_restarts"], found["name"]) == (Given(4, "--max_restarts"), Given("worker", "--role"))
    assert "max_restarts" not in launch.settings(parsed(), find(None), {})


def test_ftruns_complaints_are_translated() -> None:
    found = given({}, {"min_replicas": 5})
    text = in_our_words("--min-replicas 5 must be 1 to 2; --gpus share, --nproc-per-replica 9", found)
    assert text == (
        "fault_tolerance_config.min_replicas 5 must be 1 to 2; --ft_gpus share, num_processes (of one replica group) 9"
    )


# ---------------------------------------------------------------- one group


@pytest.mark.parametrize(
    ("words", "kind", "processes"),
    [
        (("--cpu", "--num_processes", "2"), "NO", 1),
        (("--cpu", "--num_processes", "2"), "MULTI_CPU", 2),
        (("--cpu", "--num_processes", "2"), None, 1),
        (("--multi_gpu", "--num_processes", "2"), "MULTI_GPU", 2),
        (("--cpu", "--num_processes", "4", "--num_machines", "2"), None, 2),
    ],
)
def test_on_cpus_num_processes_means_what_it_does_for_accelerate(
    words: tuple[str, ...], kind: str | None, processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process per machine, unless the file says MULTI_CPU."""
    args = parsed(*words)
    launch.one_on_cpus(args, Document("", {} if kind is None else {"distributed_type": kind}, {}))
    assert args.num_processes == processes
    said = capsys.readouterr().err
    assert ("--ft_replicas" in said) == (words[words.index("--num_processes") + 1] != str(processes))


@pytest.mark.process
@pytest.mark.parametrize("enabled", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_as_many_processes_with_and_without_fault_tolerance(run: Any, enabled: str) -> None:
    """Without, it is accelerate's own launcher."""
    env = {"FT_REPLICA_GROUP": "0", "RANK": "0"} if enabled == "false" else {}
    done, told = run("--cpu", "--num_processes", "2", "--ft_enabled", enabled, env=env)
    assert done.returncode == 0, done.stderr
    assert list(told) == ["0-0"]
    assert ("num_processes=2 on CPUs: each replica group has one process" in done.stderr) == (enabled == "true")


def test_a_group_is_what_accelerate_would_start() -> None:
    args = parsed("--cpu", "--num_processes", "2", "--tee", "3", "--log_dir", "logs")
    assert launch.group_options(args, given({"replicas": "2"})) == [
        "--nproc-per-replica=2", "--gpus=none", "--tee=3", "--log-dir=logs",
    ]  # fmt: skip
    machines = ("--num_machines", "2", "--num_processes", "4", "--main_process_ip", "h", "--main_process_port", "29501")
    assert launch.group_options(parsed("--cpu", *machines), given({"replica_group": "1"}))[:3] == [
        "--nproc-per-replica=2", "--nnodes=2", "--rdzv-endpoint=h:29501",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "flags", "said"),
    [
        (("--num_machines", "2", "--num_processes", "3"), {}, "num_processes=3 of a group on num_machines=2"),
        (("--num_machines", "2", "--num_processes", "2"), {}, "num_machines=2 would make one replica group of all"),
        (("--num_machines", "2", "--num_processes", "2"), {"replica_group": "0"}, "--main_process_ip"),
    ],
)
def test_group_sizes_that_do_not_fit(words: tuple[str, ...], flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launch.group_options(parsed("--cpu", *words), given(flags))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ft_replicas", "2", "--ft_min_replicas", "3"], "--ft_min_replicas 3 must be 1 to 2, the groups of the job"),
        (
            ["--ft_replicas", "2", "--ft_expected_replicas", "3"],
            "a part of a job .--ft_replica_group, .*needs the job's",
        ),
        (["--ft_replicas", "0"], "--ft_replicas='0' must be 1 to"),
        (["--ft_replicas", "two"], "--ft_replicas='two' must be a number of replica groups"),
        (["--ft_standby", "one"], "--ft_standby='one' must be a whole number"),
        (["--ft-min-replica=2"], "there is no option --ft-min-replica; did you mean --ft_min_replicas"),
        (["--use_megatron_lm"], "--use_megatron_lm: fault tolerance does not work with Megatron-LM"),
        (["--tpu"], "--tpu: fault tolerance does not work with TPUs"),
        (["--module", "--no_python"], "--module and --no_python exclude each other"),
        (["--cpu", "--multi_gpu"], "You can only use one of"),
        (["--config_file", "none.yaml"], "config file none.yaml cannot be read"),
    ],
)
def test_refused_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('started')")
    assert main(["launch", *words, str(script)]) == 2
    assert re.search(said, capsys.readouterr().err)


# ---------------------------------------------------------------- jobs


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, list[Any]]]]:
    """Runs the command on a script that writes down what it was told; gives the process and, per worker, its lives."""

    def started(*words: str, section: str = "", kind: str = "NO", env: Mapping[str, str] = {}) -> Any:
        script, file, folder = tmp_path / "show.py", tmp_path / "ft.yaml", tmp_path / "told"
        script.write_text(SHOW)
        folder.mkdir()
        options = [*words]
        if section:
            file.write_text(HEAD.replace("NO", kind) + section)
            options = ["--config_file", str(file), *words]
        done = subprocess.run(
            [sys.executable, "-m", "ft_accelerate", "launch", *options, str(script), str(folder), "--lr", "1", "-x"],
            env={**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": str(pathlib.Path.cwd()), **env},
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
        return done, {
            path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()
        }

    return started


@pytest.mark.process
def test_groups_of_two_cpu_processes_are_started_told_and_restarted(run: Any) -> None:
    done, told = run(
        "--num_processes", "2", "--ft_timeout_s", "33", "--mixed_precision", "bf16",
        section="  replicas: 2\n  timeout_s: 44\n  parity_check_every: 10\n", kind="MULTI_CPU",
        env={"ACCELERATE_FT_TIMEOUT_S": "55", "ACCELERATE_FT_QUORUM_TIMEOUT_S": "66", "ACCELERATE_FT_STANDBY": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {name: len(lives) for name, lives in told.items() if name != "1-1"} == {"0-0": 1, "0-1": 1, "1-0": 2}
    for name, lives in told.items():
        group, rank = name.split("-")
        env = lives[-1]["env"]
        expected = {
            "FT_REPLICA_GROUP": group, "FT_REPLICA_ID": f"replica-{group}", "RANK": rank, "LOCAL_RANK": rank,
            "WORLD_SIZE": "2", "FT_NUM_REPLICA_GROUPS": "2", "FT_TIMEOUT_S": "33", "ACCELERATE_USE_CPU": "True",
            "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_FT_QUORUM_TIMEOUT_S": "66",
            "ACCELERATE_FT_PARITY_CHECK_EVERY": "10", "ACCELERATE_FT_ENABLED": "true", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        assert {key: env.get(key) for key in expected} == expected
        assert not {"ACCELERATE_FT_TIMEOUT_S", "ACCELERATE_FT_STANDBY", "KMP_AFFINITY"} & env.keys()
        assert lives[-1]["argv"] == ["--lr", "1", "-x"]
    assert told["0-0"][0]["env"]["MASTER_PORT"] != told["1-0"][0]["env"]["MASTER_PORT"]


@pytest.mark.process
def test_switched_off_it_is_accelerate_launch(run: Any) -> None:
    done, told = run(
        section="  enabled: false\n  replicas: 2\n",
        env={"FT_REPLICA_GROUP": "0", "RANK": "0", "ACCELERATE_FT_STANDBY": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(told) == ["0-0"]
    assert "FT_LIGHTHOUSE" not in told["0-0"][0]["env"]
    assert told["0-0"][0]["env"]["ACCELERATE_FT_ENABLED"] == "false"
    assert "ftrun" not in done.stderr


# ---------------------------------------------------------------- the other commands


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(180)
def test_the_test_command_tries_accelerates_script_and_a_kill(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text(HEAD + "  replicas: 2\n  standby: 0\n")
    assert main(["test", "--config_file", str(file)]) == 0
    captured = capfd.readouterr()
    assert "Training yielded the same results on one CPU or distributed setup" in captured.out
    assert "was ended by SIGKILL; starting again now" in captured.err
    assert "replica group 1 was killed and came back; 2 processes ended with the same model" in captured.out


def test_what_the_exercise_is_judged_by(tmp_path: pathlib.Path) -> None:
    good = {"steps": 7, "digest": "a"}
    (tmp_path / "0-0.json").write_text(json.dumps(good))
    assert trial.judge(tmp_path, 2)[0] == "replica group 1 did not finish"
    (tmp_path / "1-0.json").write_text(json.dumps(good))
    assert trial.judge(tmp_path, 2)[0] == "replica group 1 was not killed"
    (tmp_path / "killed").touch()
    assert trial.judge(tmp_path, 2) == ("", [good, good])
    (tmp_path / "1-0.json").write_text(json.dumps({**good, "digest": "b"}))
    assert trial.judge(tmp_path, 2)[0].startswith("the processes ended with different models: ")


def test_the_sanity_script_is_accelerates_with_another_import() -> None:
    script = pathlib.Path(path_in_accelerate_package("test_utils", "scripts", "test_script.py")).read_text()
    assert "from ft_accelerate import FaultTolerantAccelerator as Accelerator" in trial.ours(script)
    with pytest.raises(ConfigError, match="is not known to this version"):
        trial.ours("import accelerate")


def test_the_lighthouse_command_is_ft_lighthouse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lighthouse", "--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ft-lighthouse ")
