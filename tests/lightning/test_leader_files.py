"""Who writes: one replica at a time, whoever dies; and how a whole job is resumed. Real processes, killed for real."""

from __future__ import annotations

import csv
import json
import pathlib
from typing import TYPE_CHECKING, Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from ft_core.control.lighthouse.server import LighthouseServer
from ft_lightning import FaultTolerantStrategy
from ft_lightning._compat import writers
from ft_lightning.trainer import leader_files as leader
from ft_lightning.trainer.resume import KEY
from tests.launch.job import Job, job

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/lightning/writer.py"
RUN = "lightning_logs/version_0"
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
process = [pytest.mark.process, pytest.mark.timeout(120)]


class Wishes:
    """Starts jobs of `writer.py`."""

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch

    def job(self, *options: str, **wishes: Any) -> Any:
        self._monkeypatch.setenv("WISHES", json.dumps({"root": str(self.root), **wishes}))
        self._monkeypatch.setenv("OMP_NUM_THREADS", "1")
        self._monkeypatch.setenv("PYTHONPATH", str(ROOT))
        return job(SCRIPT, *options)

    def files(self) -> list[str]:
        found = (path for path in self.root.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.root)) for path in found)

    def rows(self) -> list[dict[str, str]]:
        with (self.root / RUN / "metrics.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture
def wishes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forged_workers: None) -> Wishes:
    return Wishes(tmp_path, monkeypatch)


def ends(running: Job) -> list[list[str]]:
    """What each replica printed at its end: step, digest, best, last, leads."""
    return [line.split("] done ")[1].split() for line in running.lines.all if "] done " in line]


def alike(running: Job, replicas: int) -> list[str]:
    """All ended with the same step, digest and paths, and one of them led. Returns these."""
    found = ends(running)
    assert len(found) == replicas, running.text
    assert len({tuple(end[:-1]) for end in found}) == 1, running.text
    assert [end[-1] for end in found].count("True") == 1, running.text
    return found[0][:-1]


class TestProcesses:
    pytestmark = process

    @pytest.mark.parametrize("when", [pytest.param("epoch=0.ckpt", marks=pytest.mark.long), "epoch=2.ckpt"])
    def test_the_leader_dies_while_it_saves(self, wishes: Wishes, when: str) -> None:
        """In the middle of the run, and in the very last save: the next one saves what is missing, and goes on."""
        with wishes.job("--replicas", "2", "--max-restarts", "0", epochs=3, **{"0@save": when}) as running:
            running.run()
        end = ends(running)
        assert len(end) == 1, running.text
        step, _, best, last, leads = end[0]
        assert leads == "True"
        told = f"has made sure of what the former leader may not have written: .*/{when}"
        assert running.count(told) == 1, running.text
        files = wishes.files()
        assert {best, last} == {f"{RUN}/checkpoints/epoch=2.ckpt", f"{RUN}/checkpoints/last.ckpt"}
        assert files == sorted(
            [f"{RUN}/checkpoints/{name}.ckpt" for name in ("epoch=1", "epoch=2", "last")]
            + [f"{RUN}/hparams.yaml", f"{RUN}/metrics.csv"]
        )
        saved = torch.load(wishes.root / best, weights_only=True)
        assert saved["global_step"] == int(step) == saved[KEY]["step"]
        steps = [int(row["step"]) for row in wishes.rows()]
        assert steps == sorted(steps)
        assert len(steps) > int(step)  # of both leaders, with those of the validations

    def test_a_former_leader_comes_back(self, wishes: Wishes) -> None:
        """It knows nothing of what it was to write, so the other one leads on; with one ModelCheckpoint, in one run."""
        until = {"epochs": 10_000, "batches_after_restart": 60}
        with wishes.job("--replicas", "2", "--standby", "1", **until, **{"0@save": "epoch=0.ckpt"}) as running:
            running.run()
        _, _, best, last = alike(running, 2)
        assert running.count("replica-1.* saves and logs from step") == 1, running.text
        assert running.count("replica-0.* saves and logs from step") == 0, running.text
        assert not list(wishes.root.rglob("*.partial"))
        assert last == f"{RUN}/checkpoints/last.ckpt"
        names = [name for name in wishes.files() if name.endswith(".ckpt")]
        assert len(names) == 3  # the two best, and the last: nothing was left behind
        assert {best, last} <= set(names)
        assert [name for name in wishes.files() if "version_1" in name] == []
        steps = [int(row["step"]) for row in wishes.rows()]
        assert steps == sorted(steps)

    def test_a_write_that_fails_ends_the_leader_only(self, wishes: Wishes) -> None:
        """A full disk is one error; the others have the state in memory, and go on with it."""
        until = {"epochs": 10_000, "batches_after_restart": 60, "full": ["epoch=0.ckpt"]}
        with wishes.job("--replicas", "2", **until) as running:
            assert running.run() == 0, running.text
        alike(running, 2)
        assert running.count(r"\[replica-0\] started") == 2, running.text
        assert running.count(r"\[replica-1\] started") == 1, running.text
        assert running.count(r"replica-0\] rank 0 .* exited with code 1: OSError: .*No space left") == 1, running.text
        assert running.count(r"replica-1/0\] .*epoch=0.ckpt could not be written; training goes on") == 1, running.text

    def test_what_a_script_saves_after_fit_is_there(self, wishes: Wishes) -> None:
        """No vote follows, and nobody makes good what the leader has not written: here it dies before it writes."""
        with wishes.job("--replicas", "2", "--success", "min", epochs=1, after="final.ckpt") as running:
            assert running.run() == 0, running.text
        alike(running, 2)
        assert running.count(r"\] found True") == 1, running.text
        assert [name for name in wishes.files() if "final" in name] == ["final.ckpt"]

    def test_resume_without_shared_storage(self, wishes: Wishes) -> None:
        """Only one replica finds the checkpoint, and not the first: the other takes its state, and both go on."""
        with wishes.job("--replicas", "1", epochs=1, own_disk=True) as first:
            assert first.run() == 0, first.text
        path = wishes.root / "0" / RUN / "checkpoints/last.ckpt"
        paths = {"0": str(wishes.root / "nowhere.ckpt"), "1": str(path)}
        with wishes.job("--replicas", "2", epochs=3, own_disk=True, ckpt=paths) as second:
            assert second.run() == 0, second.text
        assert second.count(r"replica-0.*/nowhere.ckpt is not on .*: this replica starts without it") == 1
        assert second.count(r"replica-1.* found step 24 in .*last.ckpt") == 1
        assert second.count(r"replica-0.* healed to step 24: ") == 1
        assert {end[0] for end in ends(second)} == {str(24 + 2 * 12)}
        assert len({end[1] for end in ends(second)}) == 1

    def test_resume_from_a_file_that_nobody_has(self, wishes: Wishes) -> None:
        nowhere = str(wishes.root / "nowhere.ckpt")
        with wishes.job("--replicas", "2", "--max-restarts", "0", ckpt={"0": nowhere, "1": nowhere}) as running:
            assert running.run() == 1
        assert running.count(r"ckpt_path='.*nowhere.ckpt' was found by no replica of replica-0:\w+") >= 1, running.text


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 4})
        self.net = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader() -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 4, generator=generator), torch.randint(0, 2, (16,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[LighthouseServer]:
    """One replica group in this process."""
    monkeypatch.setenv("FT_REPLICA_GROUP", "0")
    monkeypatch.setenv("FT_NUM_REPLICA_GROUPS", "1")
    monkeypatch.setenv("FT_HOSTNAME", "127.0.0.1")
    server = LighthouseServer("127.0.0.1:0")
    monkeypatch.setenv("FT_LIGHTHOUSE", server.address())
    yield server
    server.shutdown()


def fit(root: pathlib.Path, strategy: Any, *, epochs: int, ckpt: Any = None, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=epochs, default_root_dir=root, log_every_n_steps=1,
        enable_model_summary=False, **({"logger": False, "enable_progress_bar": False} | options),
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(Model(), loader(), ckpt_path=ckpt)
    return trainer


def parameters(trainer: L.Trainer) -> list[float]:
    return [x for p in trainer.lightning_module.parameters() for x in p.detach().flatten().tolist()]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("first", "second"), [("ddp", "fault_tolerant"), ("fault_tolerant", "ddp")])
def test_checkpoints_go_both_ways(tmp_path: pathlib.Path, first: str, second: str) -> None:
    straight = fit(tmp_path / "a", "ddp", epochs=4, enable_checkpointing=False)
    before = fit(tmp_path / "b", first, epochs=2, callbacks=[ModelCheckpoint(save_last=True)])
    path = before.checkpoint_callback.last_model_path
    assert (KEY in torch.load(path, weights_only=True)) == (first == "fault_tolerant")
    after = fit(tmp_path / "c", second, epochs=4, ckpt=path, enable_checkpointing=False)
    assert (before.global_step, after.global_step) == (8, 16)
    assert parameters(after) == parameters(straight)


@pytest.mark.usefixtures("alone")
def test_a_whole_job_goes_on_at_the_managers_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            steps.append(trainer.strategy.manager.current_step())

    saves = ModelCheckpoint(tmp_path, save_last=True)
    fit(tmp_path, "fault_tolerant", epochs=1, callbacks=[saves, Look()])
    another = LighthouseServer("127.0.0.1:0")  # in the first one's room training has ended
    monkeypatch.setenv("FT_LIGHTHOUSE", another.address())
    options: Any = {"callbacks": [Look()], "enable_checkpointing": False}
    fit(tmp_path, "fault_tolerant", epochs=2, ckpt=saves.last_model_path, **options)
    another.shutdown()
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.usefixtures("alone")
def test_a_second_run_of_a_name_gets_a_suffix(tmp_path: pathlib.Path) -> None:
    """As with every strategy: what an earlier run has saved is not overwritten."""
    (tmp_path / "epoch=0.ckpt").write_text("of an earlier run")
    saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fit(tmp_path, "fault_tolerant", epochs=2, callbacks=[saves])
    assert (tmp_path / "epoch=0.ckpt").read_text() == "of an earlier run"
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0-v1.ckpt", "epoch=0.ckpt", "epoch=1.ckpt"]
    assert "file_exists" not in vars(saves)


class Parser:
    """Stands for LightningCLI's, which needs jsonargparse."""

    def save(self, config: Any, path: str, *, overwrite: bool, **_: Any) -> None:
        assert overwrite or not pathlib.Path(path).exists()
        pathlib.Path(path).write_text(config)


@pytest.mark.usefixtures("alone")
def test_a_restarted_replica_accepts_its_config(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("old")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    config: Any = SaveConfigCallback(Parser(), "new")
    fit(tmp_path, "fault_tolerant", epochs=1, callbacks=[config], enable_checkpointing=False)
    assert (tmp_path / "config.yaml").read_text() == "new"


@pytest.mark.usefixtures("alone")
def test_the_first_group_never_came(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leads in the first quorum writes what the provisional leader would have written."""
    monkeypatch.setenv("FT_REPLICA_GROUP", "1")
    monkeypatch.setenv("FT_NUM_REPLICA_GROUPS", "2")
    early: list[bool] = []

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            early.append(trainer.is_global_zero)

    config: Any = SaveConfigCallback(Parser(), "text")
    strategy = FaultTolerantStrategy(manager_kwargs={"expected_replicas": 1})
    options: Any = {"callbacks": [config, Look()], "logger": CSVLogger(tmp_path), "enable_checkpointing": False}
    trainer = fit(tmp_path, strategy, epochs=1, **options)
    assert early == [False]
    assert trainer.is_global_zero
    found = {path.name for path in pathlib.Path(trainer.log_dir or "").iterdir()}
    assert found == {"config.yaml", "hparams.yaml", "metrics.csv"}


def test_a_new_leader_appends_to_the_csv(tmp_path: pathlib.Path) -> None:
    old = CSVLogger(tmp_path, version=3)
    old.log_metrics({"a": 1.0}, step=0)
    old.save()
    new = CSVLogger(tmp_path, version=3)
    writers.continue_logger("lightning.pytorch", new)
    new.log_metrics({"a": 2.0, "b": 5.0}, step=1)
    new.save()
    assert (pathlib.Path(new.log_dir) / "metrics.csv").read_text().split() == ["a,b,step", "1.0,,0", "2.0,5.0,1"]


def test_states_travel_as_json(tmp_path: pathlib.Path) -> None:
    one, two = (ModelCheckpoint(tmp_path, monitor="loss", save_top_k=2) for _ in range(2))
    one.best_k_models = {"a.ckpt": torch.tensor(0.1), "b.ckpt": torch.tensor(float("inf"))}
    one.kth_best_model_path, one.best_model_path, one.last_model_path = "b.ckpt", "a.ckpt", "last.ckpt"
    one.best_model_score = one.current_score = torch.tensor(0.1)
    plain = json.loads(json.dumps(leader._plain(writers.checkpoint_state(one))))
    writers.set_checkpoint_state(two, leader._tensors(plain))
    assert str(two.state_dict()) == str(one.state_dict())
    assert two.best_k_models["a.ckpt"].item() == torch.tensor(0.1).item()


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_progress_bar_moves_to_the_leader(tmp_path: pathlib.Path, kind: Any, capsys: Any) -> None:
    shown: list[bool] = []

    class Move(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (1, 3):
                writers.progress_bar(trainer, shown=batch_idx == 3)
            bar: Any = trainer.progress_bar_callback
            shown.append(bool(bar.is_enabled))

    options: Any = {"callbacks": [Move(), kind()], "enable_progress_bar": True, "enable_checkpointing": False}
    fit(tmp_path, "ddp", epochs=2, **options)
    assert shown == [True, False, False, True, True, False, False, True]
    assert "Epoch 1" in "".join(capsys.readouterr())


@pytest.mark.usefixtures("alone")
def test_each_fit_has_a_leader_from_its_start(tmp_path: pathlib.Path) -> None:
    """Summaries and warnings come before the first quorum, also in a second fit and with DummyLogger."""
    early: list[bool] = []

    class Look(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
            early.append(trainer.is_global_zero)

    for _ in range(2):
        trainer = fit(tmp_path, "fault_tolerant", epochs=1, fast_dev_run=2, callbacks=[Look()], logger=True)
        assert trainer.global_step == 2
    fit(tmp_path, "fault_tolerant", epochs=1, callbacks=[Look()], enable_checkpointing=False)
    assert early == [True, True, True]


@pytest.mark.usefixtures("alone")
def test_a_trainer_can_be_saved_after_fit(tmp_path: pathlib.Path) -> None:
    """As with every strategy of Lightning's own."""
    trainer = fit(tmp_path, "fault_tolerant", epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    torch.save(trainer, tmp_path / "trainer.pt")
    found = torch.load(tmp_path / "trainer.pt", weights_only=False)
    assert found.global_step == trainer.global_step
    assert parameters(found) == parameters(trainer)
    assert type(found.strategy) is type(trainer.strategy)
