"""A Lightning script for test_fsdp2: kinds of training with `fault_tolerant_fsdp2`, one run after the other.

`tensor`: tensor parallelism inside each group. `manual`: two sharded modules with an optimizer each, manual
optimization. `elastic`: elastic data, and `whole`, the same with each rank holding the model. `bf16`: mixed precision.
Each saves its end as KIND.ckpt, one file. Lines: as fsdp2_job.
"""

from __future__ import annotations

import warnings
from typing import Any

warnings.filterwarnings("ignore")
import lightning as pl  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from ft_lightning import FaultTolerantFSDP2Strategy, FaultTolerantStrategy  # noqa: E402
from tests.lightning.fsdp2_job import BATCH, FOLDER, GROUP, Model, digest, net, optimizer_of, samples, say, trainer_of  # noqa: E402

STEPS = 5
UNEVEN = 150
"""Samples of kind `elastic`: the last step of an epoch has fewer than the others."""


def even() -> nn.Sequential:
    """What two ranks can divide without padding."""
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


class Tensors(Model):
    """Its layers are divided over two ranks, which compute on the same samples."""

    def configure_model(self) -> None:
        if self.net is None:
            self.net, mesh = even(), self.device_mesh
            assert mesh is not None
            parallelize_module(self.net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(self.net, mesh=mesh["data_parallel"])


class Whole(Model):
    """Not sharded."""

    def configure_model(self) -> None:
        if self.net is None:
            self.net = net()


def critic() -> nn.Sequential:
    """Of kind `manual`."""
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


class Manual(pl.LightningModule):
    """Two modules that are sharded side by side; several backwards after one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker: nn.Module | None = None

    def configure_model(self) -> None:
        if self.maker is None:
            assert self.device_mesh is not None
            self.maker, self.critic = even(), critic()
            for module in (self.maker, self.critic):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        del batch_idx
        assert self.maker is not None
        of_maker, of_critic = self.optimizers()
        made = self.maker(batch[1])
        of_critic.zero_grad()
        self.manual_backward(judged(self.critic, made.detach(), batch[1]))
        of_critic.step()
        of_maker.zero_grad()
        self.manual_backward(fooled(self.critic, made, batch[1]))
        of_maker.step()

    def configure_optimizers(self) -> Any:
        assert self.maker is not None
        return optimizer_of(self.maker), optimizer_of(self.critic)


def judged(judge: nn.Module, made: Tensor, x: Tensor) -> Tensor:
    """The critic's loss."""
    loss: Tensor = judge(made.expand(-1, 3)).mean() - judge(x).mean() + judge(x).square().mean()
    return loss


def fooled(judge: nn.Module, made: Tensor, x: Tensor) -> Tensor:
    """The generator's loss."""
    loss: Tensor = (made - x[:, :1]).square().mean() - judge(made.expand(-1, 3)).mean()
    return loss


def run(kind: str, model: pl.LightningModule, strategy: Any, data: DataLoader[Any], **options: Any) -> None:
    """Train for some steps."""
    torch.manual_seed(1)
    trainer = trainer_of(strategy, max_steps=STEPS, enable_checkpointing=False, **options)
    trainer.fit(model, data)
    for number, optimizer in enumerate(trainer.optimizers):
        held = nn.ParameterList([parameter for group in optimizer.param_groups for parameter in group["params"]])
        say("done", f"{kind}-{number}", GROUP, trainer.global_rank, digest(held, optimizer), trainer.global_step, 0)
    trainer.save_checkpoint(FOLDER / f"{kind}.ckpt")


def main() -> None:
    """All kinds."""
    torch.set_num_threads(1)

    def sharded(**options: Any) -> Any:
        return FaultTolerantFSDP2Strategy(timeout=20, save_distributed_checkpoint=False, **options)

    data = DataLoader(samples(), BATCH)
    run("tensor", Tensors("tensor"), sharded(tensor_parallel_size=2), data, accumulate_grad_batches=2)
    run("manual", Manual(), sharded(), data, accumulate_grad_batches=1, gradient_clip_val=None)
    uneven: Any = {"elastic_data": True, "global_batch_size": 32}
    for kind, strategy in (("elastic", sharded(**uneven)), ("whole", FaultTolerantStrategy(timeout=20, **uneven))):
        model = Model("elastic") if kind == "elastic" else Whole("whole")
        run(kind, model, strategy, DataLoader(samples(UNEVEN), BATCH), accumulate_grad_batches=1)
    run("bf16", Model("bf16"), sharded(), data, precision="bf16-mixed")


if __name__ == "__main__":
    main()
