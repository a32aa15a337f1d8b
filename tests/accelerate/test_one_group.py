"""What one group alone shows: vetoes, saving and resuming, the end, another run, what is refused."""

from __future__ import annotations

import itertools
import json
import pickle
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import accelerate
import pytest
import torch
from accelerate import DataLoaderConfiguration, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ft_accelerate import FaultTolerancePlugin, FaultTolerantAccelerator, healed_state, refusals
from ft_accelerate.checkpoint_folders import MANAGER
from ft_accelerate.loader import GroupDataLoader
from ft_accelerate.position import EPOCH
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError, NotAvailableError, UsageError
from ft_core.loop.runs import Runs

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from ft_accelerate.position import LoaderPosition

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(autouse=True)
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=50)
    settings = {
        "FT_LIGHTHOUSE": server.address().removeprefix("http://"), "FT_HOSTNAME": "127.0.0.1", "FT_REPLICA_GROUP": "0",
        "FT_NUM_REPLICA_GROUPS": "1", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield
    server.shutdown()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


class Setup:
    """A prepared linear model on 8 batches of two samples."""

    def __init__(self, accelerator: Any = None, **options: Any) -> None:
        torch.manual_seed(3)
        self.accelerator: Any = accelerator or FaultTolerantAccelerator(**options)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        data = DataLoader(TensorDataset(torch.randn(16, 2)), 2)
        self.model, self.optimizer, self.scheduler, self.data = self.accelerator.prepare(
            model, optimizer, scheduler, data
        )

    def step(self, x: Any) -> None:
        self.accelerator.backward(self.model(x).square().mean())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, batches: int) -> None:
        for (x,) in itertools.islice(self.data, batches):
            self.step(x)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()


def test_a_vetoed_step_changes_nothing_and_the_schedule_waits() -> None:
    s = Setup()
    for index, (x,) in enumerate(s.data):
        before, lr = s.weights, s.scheduler.get_last_lr()
        if index == 2:
            s.accelerator.manager.report_error(RuntimeError("injected"))
        s.step(x)
        assert s.accelerator.optimizer_step_was_skipped == (index == 2)
        if index == 2:
            torch.testing.assert_close(s.weights, before, rtol=0, atol=0)
            assert s.scheduler.get_last_lr() == lr
    assert s.accelerator.committed_steps == 7
    s.accelerator.end_training()


def test_a_quorum_that_breaks_is_formed_anew_with_the_next_batch() -> None:
    s = Setup()
    for index, (x,) in enumerate(s.data):
        quorum = s.accelerator.manager.quorum_id
        if index == 3:
            s.accelerator.manager._runtime.shell.fail(RuntimeError("a peer is gone"))
        s.step(x)
        assert s.accelerator.optimizer_step_was_skipped == (index == 3)
        assert index != 3 or s.accelerator._run.window.silent
        assert index != 4 or (s.accelerator.manager.quorum_id == quorum and not s.accelerator._run.window.silent)
    assert s.accelerator.committed_steps == 7
    s.accelerator.end_training()


@pytest.mark.parametrize("reads", [True, False], ids=["prepared loader", "own data"])
@pytest.mark.parametrize("vetoed", [False, True], ids=["committed", "vetoed"])
def test_a_gan_whose_generator_has_statistics(reads: bool, vetoed: bool) -> None:
    """The discriminator's step comes between the generator's forward and backward, and is committed or not."""
    torch.manual_seed(3)
    accelerator: Any = FaultTolerantAccelerator()
    g, d = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.randn(24, 4)), 8)
    g, d, for_g, for_d = accelerator.prepare(g, d, *(torch.optim.Adam(m.parameters()) for m in (g, d)))
    seen: list[int] = []
    for (real,) in accelerator.prepare(data) if reads else data:
        fake = g(torch.randn(len(real), 4))
        for_d.zero_grad()
        accelerator.backward(nn.functional.softplus(-d(real)).mean() + nn.functional.softplus(d(fake.detach())).mean())
        if vetoed and len(seen) == 1:
            accelerator.manager.report_error(RuntimeError("injected"))
        for_d.step()
        for_g.zero_grad()
        accelerator.backward(nn.functional.softplus(-d(fake)).mean())
        for_g.step()
        seen.append(int(g.module[1].num_batches_tracked))
    assert seen == ([1, 1, 2] if vetoed else [1, 2, 3])
    accelerator.end_training()


def test_what_a_group_does_by_itself_is_no_part_of_a_step() -> None:
    """Not even with a model that is in training mode, and a loss that needs gradients."""
    s = Setup()
    others = s.accelerator.prepare(DataLoader(TensorDataset(torch.randn(6, 2)), 2))
    for index, (x,) in enumerate(s.data):
        if index == 4:
            run = s.accelerator._run.window
            with run.by_itself("evaluating"):
                assert run.quorum is None
                for (other,) in others:
                    s.model(other).square().mean().backward()
            assert not run.unsettled
            assert not others.position.trained
            s.optimizer.zero_grad()
        s.step(x)
        assert not s.accelerator.optimizer_step_was_skipped
    assert s.accelerator.committed_steps == 8
    s.accelerator.end_training()


def test_a_heal_to_the_beginning_of_the_next_epoch_counts_that_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on there, as it does in the middle of an epoch: the number of the epoch came with the state."""
    s = Setup()
    run, calls, epochs = s.accelerator._run.window, itertools.count(), []
    begins = run.before_batch

    def heals(position: LoaderPosition) -> None:
        begins(position)
        if next(calls) == 3:
            state = healed_state.save(s.accelerator)
            loaders = [{**state["loaders"][0], "at": EPOCH}]
            healed_state.load(s.accelerator, {**state, "epoch": 1, "loaders": loaders})

    monkeypatch.setattr(run, "before_batch", heals)
    for _ in s.accelerator.epochs(3):
        for (x,) in s.data:
            epochs.append((s.accelerator.epoch, s.data.position.epoch))
            s.step(x)
    assert epochs == [(0, 0)] * 3 + [(1, 1)] * 8 + [(2, 2)] * 8
    s.accelerator.end_training()


def test_join_uneven_inputs_alone(tmp_path: pathlib.Path) -> None:
    """It runs out as soon as its data ends; what was accumulated then is dropped, and accumulation begins anew."""
    s = Setup(gradient_accumulation_steps=2, project_config=ProjectConfiguration(str(tmp_path)))
    batches = [x for (x,) in s.data]
    for even in (False, None):
        with s.accelerator.join_uneven_inputs([s.model, s.optimizer], even_batches=even):
            assert s.accelerator.even_batches is (even is None)
            for x in batches[:5]:
                with s.accelerator.accumulate(s.model):
                    s.step(x)
    assert s.accelerator.even_batches
    assert s.accelerator.committed_steps == 2 + 2
    s.accelerator.end_training()


def test_what_cannot_run_out() -> None:
    s = Setup()
    with pytest.raises(ConfigError, match=r"join_uneven_inputs\(\[Linear\]\): not a model or an optimizer"):
        s.accelerator.join_uneven_inputs([nn.Linear(2, 1)]).__enter__()
    Setup(s.accelerator)
    with pytest.raises(ConfigError, match="with 2 prepared models"):
        s.accelerator.join_uneven_inputs([s.model], even_batches=False).__enter__()
    s.accelerator.end_training()


def test_after_the_end_nothing_is_stepped_and_free_memory_begins_another_run() -> None:
    s = Setup()
    s.train(2)
    s.accelerator.end_training()
    with pytest.raises(UsageError, match=r"end_training\(\) was called"):
        s.train(1)
    s.accelerator.free_memory()
    again = Setup(s.accelerator)
    again.train(2)
    assert again.accelerator.committed_steps == 2
    again.accelerator.end_training()


def test_save_and_load(tmp_path: pathlib.Path) -> None:
    settings = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    s = Setup(project_config=settings)
    s.train(2)
    for _ in range(3):
        s.accelerator.save_state()
    saved = s.weights
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert not list(tmp_path.glob(".*partial"))
    s.train(2)
    s.accelerator.end_training()
    other = Setup(project_config=settings)
    other.accelerator.load_state()
    torch.testing.assert_close(other.weights, saved, rtol=0, atol=0)
    assert other.accelerator.committed_steps == 2
    other.train(2)
    torch.testing.assert_close(other.weights, s.weights, rtol=0, atol=0)
    assert other.accelerator.committed_steps == 4
    other.accelerator.end_training()
    plain = accelerate.Accelerator(cpu=True)  # can read it as well
    model = plain.prepare(nn.Linear(2, 1))
    optimizer = plain.prepare(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    plain.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5))
    plain.load_state(str(tmp_path / "checkpoints" / "checkpoint_2"))
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in model.parameters()]), saved, rtol=0, atol=0)


def test_a_checkpoint_is_in_its_place_when_all_are_known_to_hold_its_step(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more than one in the quorum; `num_participants` stands for the others, whose fence is this one's."""
    s = Setup()
    s.train(1)
    monkeypatch.setattr(s.accelerator.manager, "num_participants", lambda: 2)
    folders = [tmp_path / name for name in ("first", "second", "third")]
    s.accelerator.save_state(str(folders[0]))
    assert not folders[0].exists()
    s.train(1)
    assert folders[0].exists()
    s.accelerator.save_state(str(folders[1]))
    s.accelerator.save_state(str(folders[1]))  # again, before it is there
    assert s.accelerator.manager.stable_step() - s.accelerator._run.first_step == 1
    x = next(iter(s.data))[0]
    s.accelerator.manager.report_error(RuntimeError("injected"))
    s.step(x)  # not made, but its fence said that all hold step 2
    assert s.accelerator.optimizer_step_was_skipped
    assert folders[1].exists()
    s.train(1)
    s.accelerator.save_state(str(folders[2]))
    assert not folders[2].exists()
    s.accelerator.load_state(str(folders[2]))  # who asks for it gets it
    s.train(1)
    s.accelerator.save_state(str(folders[2]))
    s.accelerator.end_training()
    assert json.loads((folders[2] / MANAGER).read_text())["step"] == 4
    assert not list(tmp_path.glob(".*partial"))


def test_a_counter_that_began_again_replaces_no_checkpoint_of_another_step(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`completed_steps += 1` of every Accelerate example, in a group that was started again and leads now."""
    s = Setup()
    s.train(2)
    s.accelerator.save_state(str(tmp_path / "step_2"))
    s.accelerator.save_state(str(tmp_path / "latest"))
    s.train(2)
    state = healed_state.save(s.accelerator)
    s.accelerator.end_training()

    again = Setup()
    healed_state.load(again.accelerator, state)
    again.train(1)
    beside = tmp_path / "step_2.committed_5"
    assert again.accelerator.save_state(str(tmp_path / "step_2")) == str(beside)
    assert "step_2" in caplog.text
    assert "state of committed step 2, and would get that of step 5" in caplog.text
    assert "accelerator.committed_steps" in caplog.text
    assert again.accelerator.save_state(str(tmp_path / "latest")) == str(tmp_path / "latest")  # meant to be replaced
    steps = {path.name: json.loads((path / MANAGER).read_text())["step"] for path in tmp_path.iterdir()}
    assert steps == {"step_2": 2, "step_2.committed_5": 5, "latest": 5}
    again.train(1)
    assert again.accelerator.save_state(str(tmp_path / "step_2")) == str(tmp_path / "step_2")  # twice: it is meant
    again.accelerator.end_training()


@pytest.mark.parametrize(
    ("prepared", "text"),
    [
        ("model", r"gradients for 2 parameters, and no prepared optimizer has any of them \(0 optimizers were given"),
        ("other", r"no prepared optimizer has any of them \(one optimizer was given"),
        ("optimizer", "no model with parameters to train was given"),
        ("both", ""),
    ],
)
def test_gradients_that_no_prepared_optimizer_owns_are_told_of_once(
    prepared: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator: Any = FaultTolerantAccelerator()
    model: Any = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if prepared == "other":
        accelerator.prepare(torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1))
    if prepared in ("optimizer", "both"):
        optimizer = accelerator.prepare(optimizer)
    if prepared != "optimizer":
        model = accelerator.prepare(model)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == bool(text)
    assert not told or re.search(text, told[0])
    accelerator.end_training()


class Notes(GeneralTracker):
    name, requires_logging_directory = "notes", False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def start(self) -> None:
        self.told.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.told.append((step, values))

    def finish(self) -> None:
        self.told.append("finish")


def test_only_the_leader_saves_and_logs(tmp_path: pathlib.Path) -> None:
    notes = Notes()
    s = Setup(log_with=[notes])
    leadership = s.accelerator._leadership
    leadership._leads = False  # as if another group had been the first participant so far
    s.accelerator.init_trackers("project", {"lr": 1})
    s.accelerator.log({"loss": 1.0})
    assert notes.told == []
    assert not s.accelerator.is_main_process
    assert s.accelerator.save_state(str(tmp_path / "state")) is None
    assert not (tmp_path / "state").exists()
    s.train(1)  # the quorum says that this one leads: nothing was committed since, so it saves what may be missing
    assert s.accelerator.is_main_process
    assert (tmp_path / "state" / "model.safetensors").exists()
    s.accelerator.log({"loss": 2.0}, step=1)
    s.accelerator.end_training()
    assert notes.told == ["start", {"lr": 1}, (1, {"loss": 2.0}), "finish"]


def test_a_trigger_is_everybodys() -> None:
    s = Setup()
    for index, (x,) in enumerate(s.data):
        s.step(x)
        if index == 1:
            s.accelerator.set_trigger()
        assert s.accelerator.check_trigger() == (index == 1)
    s.accelerator.end_training()


def test_prepared_objects_can_be_pickled() -> None:
    s = Setup()
    optimizer, scheduler, data = pickle.loads(pickle.dumps((s.optimizer, s.scheduler, s.data)))
    assert optimizer.state_dict()["param_groups"] == s.optimizer.state_dict()["param_groups"]
    assert scheduler.get_last_lr() == s.scheduler.get_last_lr()
    assert [x.tolist() for (x,) in data] == [x.tolist() for (x,) in s.data]
    assert len(pickle.loads(pickle.dumps(s.accelerator))._models) == 1
    s.accelerator.end_training()


def test_loaders_for_training_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_NUM_REPLICA_GROUPS", "4")
    s = Setup()
    monkeypatch.setattr(s.accelerator._run.window, "before_batch", lambda position: None)  # there is no group 1, 2 or 3
    assert isinstance(s.data, GroupDataLoader)
    s.model.train()
    assert len(s.data) == 2
    assert len([*s.data]) == 2
    s.model.eval()
    with torch.no_grad():
        assert len([*s.data]) == 8
        assert len(s.accelerator.skip_first_batches(s.data, 3)) == 5
    assert len([*s.data]) == 2  # a loop that says model.train() only inside
    s.model.train()
    rest = s.accelerator.skip_first_batches(s.data, 1)
    assert len([*rest]) == 1
    s.accelerator.end_training()


def test_evaluation_that_cannot_be_shared_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    """Before training, after it, and of a stream; a group that is alone has nobody to share with."""

    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(4.0))

    class Endless:
        batch_size, drop_last = 2, False

        def __iter__(self) -> Iterator[list[int]]:
            return itertools.cycle([[0, 1], [2]])

    s = Setup(fault_tolerance_plugin=FaultTolerancePlugin(share_evaluation=True))
    data = TensorDataset(torch.arange(5))
    rest = s.accelerator.prepare(DataLoader(data, 2))
    stream = s.accelerator.prepare(DataLoader(Stream(), 2))
    endless = s.accelerator.prepare(DataLoader(data, batch_sampler=Endless()))

    def evaluated() -> list[int]:
        s.model.eval()
        with torch.no_grad():
            assert len(list(stream)) == len(list(itertools.islice(endless, 2))) == 2
            return [int(i) for (ids,) in rest for i in s.accelerator.gather_for_metrics(ids)]

    def told() -> list[str]:
        return [r.getMessage().rpartition(": ")[2] for r in caplog.records if "is not shared" in r.getMessage()]

    assert evaluated() == evaluated() == list(range(5))
    endless_why = "its Endless has no length, and may never end"
    assert told() == ["it is an IterableDataset", endless_why, "training has not begun, so there is no quorum yet"]
    s.model.train()
    s.train(8)
    caplog.clear()
    assert evaluated() == list(range(5))
    assert len(rest) == 3
    assert told() == []
    s.accelerator.end_training()
    assert evaluated() == list(range(5))
    assert told() == ["training is over"]


def test_evaluation_cannot_be_shared_where_one_process_reads_for_its_group() -> None:
    plugin, config = FaultTolerancePlugin(share_evaluation=True), DataLoaderConfiguration(dispatch_batches=True)
    with pytest.raises(ConfigError, match=r"share_evaluation=True cannot be used with dispatch_batches=True: .*leave"):
        FaultTolerantAccelerator(fault_tolerance_plugin=plugin, dataloader_config=config)


def test_the_mode_is_that_of_the_model_inside() -> None:
    s = Setup()
    run, inside = s.accelerator._run.window, s.accelerator.unwrap_model(s.model)
    assert run.training
    inside.eval()
    assert not run.training
    inside.train()
    assert run.training
    s.accelerator.end_training()
    s.accelerator.free_memory()
    pretrained = s.accelerator.prepare(nn.Linear(2, 1).eval())  # and nobody says train()
    assert run.training
    pretrained.train()
    pretrained.eval()
    assert not run.training
    s.accelerator.end_training()


def test_only_the_beginning_of_an_epoch_divides_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setup()
    divided: list[int] = []
    monkeypatch.setattr(s.accelerator._run.window, "epoch_begins", lambda: divided.append(s.data.position.code))
    for (x,) in s.accelerator.skip_first_batches(s.data, 3):  # resumed in mid-epoch: others may read the plain loader
        s.step(x)
    assert divided == []
    s.train(2)
    assert divided == [s.data.position.epoch * EPOCH]
    s.accelerator.end_training()


def test_a_newcomer_needs_the_loaders_that_are_trained_on() -> None:
    s = Setup()
    s.train(3)
    with torch.no_grad():
        assert len([*s.accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 1))))]) == 4
    donated = healed_state.save(s.accelerator)
    assert [loader["trained"] for loader in donated["loaders"]] == [1, 0]
    s.accelerator._dataloaders.pop()  # the newcomer is not there yet
    s.data.position.moved_to(0)
    healed_state.load(s.accelerator, donated)
    assert s.data.position.batch == 3
    donated["loaders"][1]["trained"] = 1
    with pytest.raises(
        ConfigError, match=r"loader 2 that they prepared, .* has prepared 1 so far: prepare all loaders"
    ):
        healed_state.load(s.accelerator, donated)
    s.accelerator.end_training()


def test_who_comes_after_the_end_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_core.loop.run.RUNS", Runs())  # the first run of this lighthouse
    s = Setup()
    s.train(1)
    s.accelerator.end_training()
    monkeypatch.setattr("ft_core.loop.run.RUNS", Runs())  # as another process
    with pytest.raises(SystemExit) as ended:
        Setup().train(1)
    assert ended.value.code == 0


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(24.0))


def test_a_loader_goes_on_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The position moves as it does when another replica's state is loaded."""
    monkeypatch.setenv("FT_NUM_REPLICA_GROUPS", "2")
    s = Setup()
    run = s.accelerator._run.window
    monkeypatch.setattr(run, "before_batch", lambda position: None)  # there is no group 1
    shuffled = s.accelerator.prepare(DataLoader(TensorDataset(torch.arange(24)), 2, shuffle=True))
    stream = s.accelerator.prepare(DataLoader(Stream(), 2))

    def move(position: Any) -> None:
        if position.code == 1:
            position.moved_to(3 * EPOCH + 4)

    for loader in (shuffled, stream):
        whole = {}
        for epoch in range(5):
            loader.set_epoch(epoch)
            whole[epoch] = [str(b) for b in loader]
        loader.set_epoch(0)
        with monkeypatch.context() as patch:
            patch.setattr(run, "before_batch", move)
            seen = [str(b) for b in loader]
        assert seen == [whole[0][0], *whole[3][4:]]
        assert loader.iteration == 4
        loader.set_epoch(1)  # the script's next epoch is the run's fifth
        assert loader.iteration == 4
    s.accelerator.end_training()


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]}, ConfigError, "comm_hook='fp16'"),
        ({"torch_tp_plugin": object()}, NotAvailableError, "torch_tp_plugin= cannot be used"),
        ({"deepspeed_plugin": object()}, ConfigError, "DeepSpeed reduces the gradients itself"),
        ({"megatron_lm_plugin": object()}, ConfigError, "Megatron-LM reduces the gradients itself"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        FaultTolerantAccelerator(**options)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_what_the_launcher_switched_on_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "true")
    with pytest.raises(ConfigError, match=f"{name}=true cannot be used with fault tolerance"):
        FaultTolerantAccelerator()


def test_a_tpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a TPU \(XLA\) cannot be used with fault tolerance: it has no process"):
        refusals.check_state(SimpleNamespace(distributed_type=DistributedType.XLA))


def test_split_batches_must_fit_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_NUM_REPLICA_GROUPS", "3")
    accelerator = FaultTolerantAccelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    with pytest.raises(ConfigError, match="split_batches=True with batch_size=2: it must be a multiple of 3"):
        accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 1)), 2))


def test_a_closure_is_refused() -> None:
    s = Setup()
    with pytest.raises(ConfigError, match=r"SGD.step\(closure\) cannot be used with fault tolerance"):
        s.optimizer.step(lambda: 0.0)
    s.accelerator.end_training()
