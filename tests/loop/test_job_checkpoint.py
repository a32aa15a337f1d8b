"""The state of a job in a folder, of one process: what is in it, what it leaves behind, and what does not fit."""

from __future__ import annotations

import pathlib
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ft_core.errors import ConfigError
from ft_core.loop.job_checkpoint import JobCheckpoint, JobState, keeping_none
from ft_core.loop.publishing import PlacedFolder

if TYPE_CHECKING:
    from collections.abc import Iterator


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(width, 2), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def job(width: int = 3) -> tuple[Net, torch.optim.Optimizer, JobState]:
    net = Net(width)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer, JobState({"model": net, "optimizer": optimizer})


def step(net: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def save(state: JobState, folder: pathlib.Path, **options: Any) -> JobCheckpoint:
    checkpoint = JobCheckpoint(folder, 0, 0, 1)
    checkpoint.write(state.current(), **{"asynchronous": False, **options})
    return checkpoint


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """DCP's asynchronous writes want one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_parameters_that_nobody_has_used(tmp_path: pathlib.Path) -> None:
    net, optimizer, state = job()
    step(net, optimizer)
    save(state, tmp_path / "one").place()
    other, theirs, fresh = job()
    fresh.load(tmp_path / "one")
    assert set(theirs.state) == set(other.used.parameters())
    step(net, optimizer)
    step(other, theirs)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_an_optimizer_without_a_step_is_left_as_it_is(tmp_path: pathlib.Path) -> None:
    """torch makes its state by a step, which Adam counts."""
    net, optimizer, state = job()
    save(state, tmp_path / "zero").place()
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in net.parameters())
    other, theirs, fresh = job()
    fresh.load(tmp_path / "zero")
    assert not theirs.state
    step(net, optimizer)
    step(other, theirs)
    assert [float(held["step"]) for held in theirs.state.values()] == [1.0, 1.0]
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_gradients_that_are_there_when_a_checkpoint_is_loaded(tmp_path: pathlib.Path) -> None:
    """torch makes no state for an optimizer then, so there would be nothing to load into."""
    net, optimizer, state = job()
    step(net, optimizer)
    save(state, tmp_path / "one").place()
    other, theirs, fresh = job()
    other(torch.ones(1, 3)).sum().backward()
    fresh.load(tmp_path / "one")
    assert len(theirs.state) == 2


def test_what_does_not_fit(tmp_path: pathlib.Path) -> None:
    save(job()[2], tmp_path / "narrow").place()
    with pytest.raises(
        ConfigError, match=r"load_distributed\('.*narrow'\): it does not fit this job's state, or is no"
    ):
        job(5)[2].load(tmp_path / "narrow")
    lost = next((tmp_path / "narrow").glob("*.distcp"))
    lost.unlink()
    with pytest.raises(ConfigError, match=r"narrow'\): it does not fit this job's state, or is not whole: "):
        job()[2].load(tmp_path / "narrow")
    with pytest.raises(ConfigError, match=r"no checkpoint of torch\.distributed\.checkpoint is there"):
        job()[2].load(tmp_path / "nowhere")


def test_state_that_torch_makes_to_save_it_does_not_stay() -> None:
    """Of other formats than ours, which hold it: the leading group alone would be a step of Adam further."""
    net, optimizer, _ = job()
    trained, other, _ = job()
    step(trained, other)
    with keeping_none([optimizer, other]):
        for module, one in ((net, optimizer), (trained, other)):
            assert get_optimizer_state_dict(module, one)["state"]
    assert not optimizer.state
    assert {int(state["step"]) for state in other.state.values()} == {1}


def test_an_asynchronous_write_waits_for_the_one_before(tmp_path: pathlib.Path) -> None:
    """Two at once would communicate on one process group, each rank in another order."""
    state = job()[2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = save(state, tmp_path / "first", asynchronous=True)
        second = save(state, tmp_path / "second", asynchronous=True)
    assert first.work is not None
    assert first.work.done()
    assert second.work is not None
    second.work.result()
    first.place()
    second.place()
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", "latest"}


def test_an_asynchronous_write_ends_when_the_folder_may_be_put_in_its_place(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when DCP's own future does: its callbacks run after who waits for it goes on."""
    completes = PlacedFolder.complete

    def slowly(folder: PlacedFolder, writing: str) -> None:
        threading.Event().wait(0.2)
        completes(folder, writing)

    monkeypatch.setattr(PlacedFolder, "complete", slowly)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint = save(job()[2], tmp_path / "one", asynchronous=True)
    assert checkpoint.work is not None
    assert checkpoint.work.exception() is None
    checkpoint.place()
    assert {path.name for path in tmp_path.iterdir()} == {"one", "latest"}


def test_what_could_not_be_written_takes_no_room(tmp_path: pathlib.Path) -> None:
    state = job()[2].current()
    state["bad"] = lambda: None  # cannot be pickled
    checkpoint = JobCheckpoint(tmp_path / "one", 0, 0, 1)
    with pytest.raises(BaseException, match="lambda"):
        checkpoint.write(state, asynchronous=False)
    assert not list(tmp_path.iterdir())
