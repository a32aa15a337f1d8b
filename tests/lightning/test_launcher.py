"""`python train.py` without a launcher, what `devices` means where, and what runs in the process itself."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner

from ft_core.errors import ConfigError
from ft_lightning import launcher
from ft_lightning.classes import strategy_class
from ft_lightning.placement import CHILD, GroupEnvironment, Place, check, keep, look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lightning.forge import Forge, Forged

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's use of torch
]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def trainer(**kwargs: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(**{"strategy": "fault_tolerant", "accelerator": "cpu", **quiet, "limit_val_batches": 2, **kwargs})


# ---------------------------------------------------------------- real runs


class Run:
    """A user's command, as it runs; with a forge, it and what it starts have imported Lightning already."""

    def __init__(self, *command: str, cwd: pathlib.Path, forge: Forge | None = None, **env: str) -> None:
        self.lines: list[str] = []
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **env}
        out, to_out = os.pipe()
        self.process: subprocess.Popen[bytes] | Forged
        self.output = open(out)  # noqa: SIM115 - closed by __exit__
        try:
            whole = [sys.executable, "-u", *command]
            if forge is not None:
                self.process = forge.start(whole, env, to_out, to_out, cwd=str(cwd), launches=True)
            else:
                self.process = subprocess.Popen(whole, cwd=cwd, stdout=to_out, stderr=to_out, env=env)
        finally:
            os.close(to_out)

    def __iter__(self) -> Iterator[str]:
        for line in self.output:
            self.lines.append(line.rstrip())
            yield line

    def end(self) -> int:
        """Read to the end. Returns the exit status."""
        list(self)
        return self.process.wait()

    def found(self, pattern: str) -> list[Any]:
        return re.findall(pattern, "\n".join(self.lines))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()


@pytest.mark.process
def test_a_script_becomes_its_own_supervisor_and_survives_a_kill(tmp_path: pathlib.Path, forge: Forge) -> None:
    program = ROOT / "tests/lightning/launcher_job.py"
    with Run(str(program), "kill", "3", "run", cwd=tmp_path, forge=forge, SLURM_JOB_ID="7", SLURM_PROCID="1") as run:
        for line in run:
            if found := re.search(r"replica-1/0\] step 10 \d (\d+)", line):
                os.kill(int(found[1]), signal.SIGKILL)
                break
        assert run.end() == 0, run.lines
    assert len(run.found(r"replica-1\] .* SIGKILL.*; starting again now")) == 1
    assert len(run.found(r"replica-\d/0\] step 140 3 ")) == 3
    assert f"before {run.process.pid}" in run.lines
    assert len(run.found(r"\] before \d+")) == 4  # three groups, one of them twice
    ends = run.found(r"\[replica-\d/0\] after (\d+ \w+) (\S+)")
    assert len(ends) == len(run.found(r"after \d+ \w+")) == 3  # in the groups only
    assert set(ends) == {(ends[0][0], str(tmp_path / "run"))}
    assert ends[0][0].startswith("150 ")
    assert not run.found("exception")


@pytest.mark.long
@pytest.mark.process
def test_as_a_module_of_the_other_tree_with_the_jobs_status(tmp_path: pathlib.Path) -> None:
    """From nothing, with interpreters of their own; the module is found from where the command was given only."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "train.py").write_text((ROOT / "tests/lightning/launcher_job.py").read_text())
    with Run("-m", "package.train", "fail", "2", "run", cwd=tmp_path, TREE="pytorch_lightning") as run:
        assert run.end() == 1, run.lines
    assert run.found("ftrun: -m package.train: 2 replica groups")
    assert run.found("ValueError: on purpose")
    assert run.found(r"\] exception ValueError")
    assert f"exception SystemExit {run.process.pid}" not in run.lines


@pytest.mark.process
def test_fabric_launches_likewise(tmp_path: pathlib.Path, forge: Forge) -> None:
    (tmp_path / "steps").write_text("5")
    program, steps = str(ROOT / "tests/lightning/fabric_job.py"), str(tmp_path / "steps")
    with Run(program, cwd=tmp_path, forge=forge, DEVICES="2", STEPS_FILE=steps) as run:
        assert run.end() == 0, run.lines
    assert len(run.found(r"replica-\d/0\] done 5 ")) == 2
    assert len(set(run.found(r"done 5 (\w+)"))) == 1


# ---------------------------------------------------------------- how this process was started


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def started(*argv: str, name: str | None = None, file: str | None = None) -> None:
        module = ModuleType("__main__")
        module.__spec__ = SimpleNamespace(name=name) if name else None  # type: ignore[assignment]
        if file:
            module.__file__ = file
        monkeypatch.setitem(sys.modules, "__main__", module)
        monkeypatch.setattr(sys, "argv", list(argv))

    return started


def test_the_command_line_is_repeated(started: Callable[..., None], tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train me.py"
    script.touch()
    started("train me.py", "--lr", "0.1", file=str(script))
    assert launcher.own_command() == [str(script), "--lr", "0.1"]
    started("train.py", "--lr", "0.1", name="package.train", file=str(script))
    assert launcher.own_command() == ["--module", "package.train", "--lr", "0.1"]
    started("__main__.py", name="package.__main__", file=str(script))
    assert launcher.own_command() == ["--module", "package"]
    started("folder", name="__main__", file=str(script))  # python folder
    assert launcher.own_command() == [str(script)]


def test_what_cannot_be_repeated(started: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    started("-c")
    with pytest.raises(ConfigError, match="from python -c: start it with a launcher"):
        launcher.own_command()
    started("-")
    with pytest.raises(ConfigError, match=r"from standard input.*start it with a launcher .ftrun --replicas 3"):
        launcher.own_command()
    started("app.zip", name="__main__", file="app.zip/__main__.py")
    with pytest.raises(ConfigError, match="an archive"):
        launcher.own_command()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigError, match=r"interactive Python.*validate, test and predict work here"):
        launcher.own_command()


def test_jupyter_gets_its_message_when_it_trains_and_can_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.trainer.connectors import accelerator_connector

    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    notebook = trainer(devices=3, max_steps=1)
    assert len(notebook.validate(BoringModel(), verbose=False)) == 1
    with pytest.raises(ConfigError, match="interactive Python"):
        notebook.fit(BoringModel())


@pytest.mark.parametrize(("environ", "devices", "nodes", "message"), [
    ({}, 3, 2, "num_nodes=2 without a launcher.*ftrun --replica N"),
    ({"FT_REPLICA_GROUP": "1"}, 3, 1, "FT_REPLICA_GROUP=1 .* FT_LIGHTHOUSE"),
    ({"FT_NUM_REPLICA_GROUPS": "4"}, 3, 1, "FT_NUM_REPLICA_GROUPS=4"),
    ({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, 3, 1, "LOCAL_RANK=0 .* FT_LIGHTHOUSE=host:port"),
    ({"WORLD_SIZE": "2"}, 3, 1, "WORLD_SIZE=2"),
    ({}, 0, 1, "devices=0"),
])  # fmt: skip
def test_what_may_not_start_a_job(environ: dict[str, str], devices: int, nodes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launcher.check(environ, devices, nodes)
    launcher.check({"SLURM_JOB_ID": "1", "WORLD_SIZE": "1"}, 3, 1)


def test_more_groups_wanted_than_there_are_devices() -> None:
    with pytest.raises(ConfigError, match=r"min_replicas=5 with devices=2: .* Write devices=5 or more, or"):
        launcher.check_quorum(5, 2)
    for fine in None, 1, 2:
        launcher.check_quorum(fine, 2)


def test_an_argument_with_nearly_the_right_name() -> None:
    with pytest.raises(ConfigError, match="FaultTolerantStrategy has no argument elastic; did you mean elastic_data="):
        strategy_class()(elastic=True)


def test_signals_need_the_main_thread() -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            launcher.check({}, 3, 1)
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "cannot take signals" in str(caught[0])


# ---------------------------------------------------------------- devices


def test_where_a_process_stands() -> None:
    assert look({"RANK": "3", "WORLD_SIZE": "8", "FT_REPLICA_GROUP": "2"}) == Place(False)
    torchrun = {
        "TORCHELASTIC_RUN_ID": "a", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "FT_REPLICA_GROUP": "2", "FT_NUM_REPLICA_GROUPS": "5",
    }  # fmt: skip
    place = Place(True, 0, 2, 5, 3, 1, 4, 2, 1)
    assert look(torchrun) == place
    assert look({**torchrun, CHILD: "b:5"}) == place  # an ftrun inside one of our processes
    assert look({**torchrun, CHILD: "a:5"}).groups == 5
    for by_hand in ({"FT_LIGHTHOUSE": "host:1"}, {"TORCHFT_LIGHTHOUSE": "host:1"}):
        assert look(by_hand) == Place(True)
    assert look({}, "host:1") == Place(True)
    with pytest.raises(ConfigError, match="RANK='one'"):
        look({"FT_LIGHTHOUSE": "host:1", "RANK": "one"})


def test_devices_that_a_process_keeps() -> None:
    gpus = [torch.device("cuda", index) for index in (1, 3, 5)]
    assert keep(None, Place(False)) is None
    assert keep([], Place(False)) == []
    assert keep(gpus, Place(False)) == gpus[:1]
    assert keep(gpus, Place(True)) == gpus
    assert [keep(gpus, Place(True, groups=3, group=group)) for group in range(3)] == [[gpu] for gpu in gpus]
    assert keep(gpus[:1], Place(True, groups=3, group=2)) == gpus[:1]


@pytest.mark.parametrize(("place", "devices", "nodes", "message"), [
    (Place(True, local_world_size=1), 3, 1, r"devices=3, but this replica group has 1 process .*write devices=1.*"
     r"--nproc-per-replica 3"),
    (Place(True, local_world_size=2, world_size=2), 1, 1, "has 2 processes on this machine.*write devices=2"),
    (Place(True, local_world_size=2, world_size=4), 2, 1, "num_nodes=1 .*write num_nodes=2"),
])  # fmt: skip
def test_devices_have_to_match_the_launchers(place: Place, devices: int, nodes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(place, devices, nodes, "Trainer")
    check(place, place.local_world_size, place.world_size // place.local_world_size, "Trainer")
    check(Place(True, groups=3), 3, 1, "Trainer")
    check(Place(False), 3, 1, "Trainer")


def test_a_mismatch_is_told_when_the_host_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_LIGHTHOUSE", "host:1")
    with pytest.raises(ConfigError, match=r"Trainer\(devices=, num_nodes=\) describe one replica group"):
        trainer(devices=3)
    with pytest.raises(ConfigError, match=r"Fabric\(devices=, num_nodes=\) describe one replica group"):
        Fabric(strategy="fault_tolerant", accelerator="cpu", devices=3)


def test_a_process_of_our_own_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHILD, "abc:3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    monkeypatch.setenv("FT_REPLICA_GROUP", "2")
    monkeypatch.setenv("FT_NUM_REPLICA_GROUPS", "3")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for host in (trainer(devices=3), Fabric(strategy="fault_tolerant", accelerator="cpu", devices=3)):
        strategy: Any = host.strategy
        assert strategy.parallel_devices == [torch.device("cpu")]
        assert strategy.wanted_devices == 3
        assert strategy.root_device == torch.device("cpu")
        assert (strategy.replica_group, strategy.num_replica_groups, host.world_size) == (2, 3, 1)
        assert strategy.launcher is None


# ---------------------------------------------------------------- the cluster environment


def test_slurm_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {
        "SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NODELIST": "a,b", "SLURM_JOB_NAME": "train",
    }  # fmt: skip
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    for host in (trainer(devices=2), trainer(strategy=strategy_class()(), devices=2)):
        assert isinstance(host.strategy.cluster_environment, GroupEnvironment)
        assert (host.global_rank, host.local_rank, host.node_rank, host.world_size) == (0, 0, 0, 1)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")  # Lightning's own environment would refuse this
    assert trainer(strategy=strategy_class()(), devices=2).world_size == 1
    with pytest.raises(ConfigError, match=r"cluster_environment=.*LightningEnvironment"):
        strategy_class()(cluster_environment=LightningEnvironment())


def test_the_groups_store_is_advertised_where_the_lighthouse_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(place: Place, lighthouse: str | None = None) -> str:
        return GroupEnvironment(place, lighthouse).main_address

    assert address(Place(False)) == "127.0.0.1"
    assert address(Place(True), "localhost:1") == "127.0.0.1"
    assert address(Place(True), "[::1]:1,localhost:1") == "::1"
    monkeypatch.setenv("FT_HOSTNAME", "node7")
    assert address(Place(True), "192.0.2.1:1") == "node7"
    monkeypatch.setenv("MASTER_ADDR", "node8")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert address(Place(True)) == "node8"
    assert GroupEnvironment(Place(True)).main_port == 1234
    assert GroupEnvironment(Place(False)).main_port != 1234
    assert address(Place(False)) == "127.0.0.1"


# ---------------------------------------------------------------- in the process itself


class Tuned(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_evaluation_needs_no_lighthouse() -> None:
    for run in ("validate", "test", "predict"):
        host = trainer(devices=3, limit_test_batches=2, limit_predict_batches=2)
        result = getattr(host, run)(BoringModel(), **({} if run == "predict" else {"verbose": False}))
        assert len(result) == (2 if run == "predict" else 1)
        assert host.world_size == 1
        assert host.num_devices == 1


def test_fit_supervises_as_many_groups_as_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes to ftrun; and nobody takes the end of the starting process for a failure."""
    from ft_core.launch import __main__ as ftrun

    told: list[list[str]] = []

    def main(argv: list[str]) -> int:
        told.append(argv)
        return 7

    monkeypatch.setattr(ftrun, "main", main)
    monkeypatch.setattr(launcher, "own_command", lambda: ["train.py", "--lr", "1"])
    monkeypatch.setenv(CHILD, "")
    calls: list[str] = []
    callback = LambdaCallback(on_exception=lambda *_: calls.append("on_exception"))
    host = trainer(
        strategy=strategy_class()(min_replicas=2, ftrun_options=["--standby", "1"]), devices=4, callbacks=[callback]
    )
    with pytest.raises(SystemExit) as ended:
        host.fit(BoringModel())
    assert not calls
    assert ended.value.code == 7
    run_id = os.environ[CHILD].removesuffix(":4")
    assert told == [[
        "--replicas", "4", "--run-id", run_id, "--gpus", "all", "--min-replicas", "2", "--standby", "1",
        "train.py", "--lr", "1",
    ]]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_tuner_needs_no_lighthouse(tmp_path: pathlib.Path) -> None:
    host = trainer(devices=3, max_epochs=1, default_root_dir=tmp_path)
    model = Tuned()
    found = Tuner(host).lr_find(model, num_training=12, early_stop_threshold=None)
    assert found is not None
    assert len(found.results["loss"]) > 5
