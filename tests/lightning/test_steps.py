"""What one Trainer alone shows: refused optimizers, the vote's bookkeeping, hooks that are put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError
from ft_lightning import FaultTolerantStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


@pytest.fixture(autouse=True)
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    monkeypatch.setenv("FT_LIGHTHOUSE", server.address().removeprefix("http://"))
    monkeypatch.setenv("FT_HOSTNAME", "127.0.0.1")
    monkeypatch.setenv("FT_REPLICA_GROUP", "0")
    monkeypatch.setenv("FT_NUM_REPLICA_GROUPS", "1")
    yield
    server.shutdown()


class Module(pl.LightningModule):
    """Manual unless told otherwise; `act` is its training_step."""

    def __init__(
        self,
        act: Callable[[Any, Tensor], Any] | None = None,
        optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ) -> None:
        super().__init__()
        self.layer, self.act, self.make = nn.Linear(2, 1), act, optimizer
        self.automatic_optimization = act is None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        return loss if self.act is None else self.act(self, loss)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def fit(module: Module, *callbacks: pl.Callback, steps: int = 4, strategy: Any = None, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy=strategy or FaultTolerantStrategy(), accelerator="cpu", devices=1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(2 * steps, 2)), 2))
    return trainer


def untouched(module: Module, before: Tensor) -> None:
    torch.testing.assert_close(module.layer.weight, before, rtol=0, atol=0)


def test_lbfgs_is_refused_before_training() -> None:
    module = Module(optimizer=torch.optim.LBFGS)
    before = module.layer.weight.clone()
    with pytest.raises(ConfigError, match=r"LBFGS cannot be used with strategy=.*use another optimizer"):
        fit(module)
    untouched(module, before)


class Twice(torch.optim.SGD):
    """Evaluates its closure twice."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_an_optimizer_that_evaluates_its_closure_twice_is_refused_at_its_first_step() -> None:
    module = Module(optimizer=lambda parameters: Twice(parameters, lr=0.1))
    before = module.layer.weight.clone()
    with pytest.raises(ConfigError, match="Twice evaluates its closure more than once per step"):
        fit(module)
    untouched(module, before)


def raw(module: Any, loss: Tensor) -> None:
    module.manual_backward(loss)
    module.optimizers(use_pl_optimizer=False).step()


def in_closure(module: Any, loss: Tensor) -> None:
    optimizer = module.optimizers()
    optimizer.step(lambda: raw(module, loss))


def own(module: Any, loss: Tensor) -> None:
    module.manual_backward(loss)
    torch.optim.Adam(module.parameters()).step()


@pytest.mark.parametrize("act", [raw, in_closure, own])
def test_a_step_past_lightning_is_refused(act: Callable[[Any, Tensor], Any]) -> None:
    module = Module(act)
    before = module.layer.weight.clone()
    with pytest.raises(ConfigError, match=r"step\(\) was called past Lightning.*self\.optimizers\(\)"):
        fit(module)
    untouched(module, before)
    loose = torch.optim.SGD(module.parameters(), lr=0.1)
    loose.step()  # after `fit` it is nobody's business


def test_an_optimizer_of_something_else_may_step() -> None:
    def act(module: Any, loss: Tensor) -> None:
        other = nn.Parameter(torch.ones(1))
        other.sum().backward()
        torch.optim.SGD([other], lr=1.0).step()
        assert other.item() == 0.0
        module.manual_backward(loss)
        module.optimizers().step()

    trainer = fit(Module(act))
    assert trainer.global_step == 4


class Veto(pl.Callback):
    """Reports an error in batch 1; notes what the strategy says after each batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int, int, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.strategy.manager.report_error(RuntimeError("injected"))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        self.seen.append((
            strategy.step_vetoed, strategy.committed_steps, strategy.vetoed_steps, trainer.global_step
        ))  # fmt: skip
        assert batch_idx != 1 or all(p.grad is None for p in pl_module.parameters())


def with_scheduler(module: Module) -> list[Any]:
    made: list[Any] = []

    def configure() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        made.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        return [optimizer], [{"scheduler": made[0], "interval": "step"}]

    module.configure_optimizers = configure  # type: ignore[method-assign]
    return made


def test_a_veto_is_told_and_counted_and_advances_nothing() -> None:
    module, veto = Module(), Veto()
    schedulers = with_scheduler(module)
    trainer = fit(module, veto)
    assert veto.seen == [(False, 1, 0, 1), (True, 1, 1, 1), (False, 2, 1, 2), (False, 3, 1, 3)]
    assert trainer.fit_loop.epoch_loop.scheduler_progress.total.completed == 3
    assert trainer.fit_loop.epoch_loop.scheduler_progress.total.ready == 3
    assert schedulers[0].last_epoch == 3
    assert "lr_scheduler_step" not in vars(module)  # the guard is gone


def test_max_steps_counts_commits() -> None:
    trainer = fit(Module(), Veto(), max_steps=3)
    assert trainer.global_step == 3
    assert trainer.strategy.vetoed_steps == 1


def test_a_module_that_steps_only_sometimes() -> None:
    """Lightning's documented way: call the closure alone in some batches."""
    module = Module()

    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure) if batch_idx % 2 else closure()

    module.optimizer_step = optimizer_step
    trainer = fit(module)
    assert trainer.strategy.committed_steps == 2


def test_precision_without_a_loss() -> None:
    """training_step returns None on every replica: no gradient at all, so there is nothing to unscale."""
    module = Module()
    module.training_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    before = module.layer.weight.clone()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        fit(module, strategy=FaultTolerantStrategy(find_unused_parameters=True))
    untouched(module, before)
