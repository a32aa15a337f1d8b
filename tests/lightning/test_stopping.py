"""Ending together: whoever wants to stop, all end after the same step; whoever fails is not waited for."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import lightning as L
import pytest
import torch
from torch import nn

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.loop.runs import RUNS, Runs
from ft_lightning.classes import strategy_class
from tests.chaos.test_ftrun import pid_of
from tests.lightning.test_leader_files import alike, ends
from tests.lightning.test_leader_files import wishes as wishes

if TYPE_CHECKING:
    import pathlib
    import re
    from collections.abc import Iterator

    from tests.launch.job import Job
    from tests.lightning.test_leader_files import Wishes

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]
process = [pytest.mark.process, pytest.mark.timeout(120)]


class TestProcesses:
    pytestmark = process

    @pytest.mark.parametrize(
        ("wish", "step"),
        [
            pytest.param({"patience": {"0": 10.0}}, 12, marks=pytest.mark.long),
            ({"patience": {"1": 10.0}}, 12),
            ({"1@5": "stop"}, 5),
            ({}, 36),
        ],
        ids=["early stopping on the leader", "early stopping on another", "should_stop in a step", "max_epochs"],
    )
    def test_one_wants_to_stop(self, wishes: Wishes, wish: dict[str, Any], step: int) -> None:
        """No step is made that only some replicas make, and none is lost or added where all agree."""
        with wishes.job("--replicas", "2", **wish) as running:
            assert running.run() == 0, running.text
        assert int(alike(running, 2)[0]) == step
        assert running.count("stops, as another replica has ended its training") == (0 if step == 36 else 1)

    @pytest.mark.parametrize("how", ["raise", "interrupt"])
    def test_one_fails(self, wishes: Wishes, how: str) -> None:
        """It ends at once, with an error; the others go on at once, far below the timeout of 60 s."""
        with wishes.job("--replicas", "2", "--max-restarts", "0", **{"1@5": how}) as running:
            running.run()
        assert len(ends(running)) == 1, running.text
        assert ends(running)[0][0] >= "30"
        assert running.count(r"replica-1.* exited with code 1") >= 1, running.text

    def test_a_drained_replica_ends_with_status_0(self, wishes: Wishes) -> None:
        """SIGTERM to one worker: after its step, through Lightning's teardown; nobody loses a step."""

        def drain(_: re.Match[str]) -> None:
            os.kill(pid_of(running, "replica-0"), signal.SIGTERM)

        running: Job
        with wishes.job("--replicas", "2", epochs=6) as running:
            running.when(r"replica-1/0\] step 5 ", drain)
            assert running.run() == 0, running.text
        assert running.count(r"replica-0:\w+: drained at step \d+ \(SIGTERM\): left the quorum, ending with stat") == 1
        assert running.count("not committed(?!: StopTogether)") == 0, running.text
        assert running.count(r"replica-1.* saves and logs from step") == 1
        assert "2 finished" in running.lines.all[-1]
        assert ", 0 restarts" in running.lines.all[-1]
        assert running.count(r"replica-0/0\] done") == 0


class Model(L.LightningModule):
    def __init__(self, reduces: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.reduces = reduces
        self.reduced: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.reduces:
            strategy: Any = self.trainer.strategy
            self.reduced += [strategy.reduce_across_groups(loss).item() - loss.item()]
            self.reduced += [strategy.reduce_across_groups(torch.tensor(3), average=False).item() - 3]
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val", self.trainer.strategy.reduce_across_groups(loss), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,))), 4
    )


def trainer(root: pathlib.Path, **options: Any) -> L.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    given = {"strategy": "fault_tolerant", "max_epochs": 1, **options}
    return L.Trainer(accelerator="cpu", devices=1, default_root_dir=root, **quiet, **given)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = LighthouseServer("127.0.0.1:0")
    for name, value in {"FT_REPLICA_GROUP": "0", "FT_NUM_REPLICA_GROUPS": "1", "FT_HOSTNAME": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FT_LIGHTHOUSE", server.address())
    yield
    server.shutdown()


@pytest.mark.usefixtures("alone")
def test_reducing_inside_training_step(tmp_path: pathlib.Path) -> None:
    model = Model(reduces=True)
    trainer(tmp_path, num_sanity_val_steps=0).fit(model, loader(), loader())
    assert model.reduced == [0.0] * 8


@pytest.mark.usefixtures("alone")
def test_max_time_ends_the_run(tmp_path: pathlib.Path) -> None:
    runner = trainer(tmp_path, max_time={"microseconds": 1})
    runner.fit(Model(), loader())
    assert runner.should_stop


def test_evaluation_needs_no_lighthouse(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_LIGHTHOUSE", "127.0.0.1:1")  # nobody listens there
    for group, leads in (("0", True), ("1", False)):
        monkeypatch.setenv("FT_REPLICA_GROUP", group)
        runner = trainer(tmp_path)
        assert runner.is_global_zero is leads
        assert "val" in runner.validate(Model(), loader(), verbose=False)[0]


@pytest.mark.usefixtures("alone")
def test_several_fits_in_a_room_of_the_users(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a room of its own then, too; and who comes back finds the one that is under way."""
    monkeypatch.setattr(RUNS, "ended", 0)
    strategy: dict[str, Any] = {"manager_kwargs": {"room_id": "mine"}}
    address, found = os.environ["FT_LIGHTHOUSE"], []

    class Asking(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            found.append((RUNS.room("mine"), Runs().later(address, "mine"), Runs().later(address)))

    for _ in range(2):
        runner = trainer(tmp_path, strategy=strategy_class()(**strategy), callbacks=[Asking()])
        runner.fit(Model(), loader())
        assert runner.global_step > 0
    assert list(dict.fromkeys(found)) == [("mine", False, False), ("mine.2", True, False)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("fails", [False, True])
def test_what_an_epoch_that_was_cut_short_left_unread(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Is told, unless something worse is: the others go on with that epoch, and a traceback follows."""

    def missed(runner: L.Trainer, *_: Any) -> None:
        strategy: Any = runner.strategy
        strategy._takeover.unseen.count(1, 2)  # as if another group were away
        if fails:
            raise ValueError("mine")

    callback = L.pytorch.callbacks.LambdaCallback(on_train_batch_end=missed)
    runner = trainer(tmp_path, max_epochs=2, max_steps=2, callbacks=[callback])
    with pytest.raises(ValueError, match="mine") if fails else contextlib.nullcontext():
        runner.fit(Model(), loader())
    assert ("was not read" in caplog.text) is not fails


@pytest.mark.usefixtures("alone")
def test_a_job_that_is_finished_has_nothing_for_a_latecomer(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path).fit(Model(), loader())
    monkeypatch.setattr(RUNS, "ended", 0)  # as in a process that has just been started
    with pytest.raises(SystemExit) as ended:
        trainer(tmp_path).fit(Model(), loader())
    assert ended.value.code == 0
