"""One process of test_parity: trains in each mode that its words name, and prints `MODE DIGEST LR STEPS` after each.

Words: `mode=store-port#lighthouse` (`#-`: plain Accelerate). Its place comes from RANK, WORLD_SIZE and FT_*.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
from accelerate import Accelerator, DataLoaderConfiguration  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import DistributedDataParallelKwargs, set_seed  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCHS, BATCH, SAMPLES = 2, 4, 86


def net(seed: int) -> nn.Module:
    """Equal on all ranks; with BatchNorm, so that there are buffers.

    Without a bias before it, whose gradient would be rounding noise and nothing else, which AdamW makes large.
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def loader(**options: Any) -> Any:
    numbers = torch.arange(options.pop("samples", SAMPLES))
    x = torch.stack([numbers % 7, numbers % 11, numbers % 13], 1) / 10
    return DataLoader(TensorDataset(x), options.pop("batch_size", BATCH), shuffle=True, **options)


def digest(*models: Any) -> str:
    parts = [t.detach().numpy().tobytes() for m in models for t in m.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def target(x: Any) -> Any:
    return x.sum(1, keepdim=True).square()


def shown(accelerator: Any, *models: Any) -> tuple[Any, str]:
    """The parameters themselves where an environment variable asks for that."""
    if "VALUES" in os.environ:
        return accelerator, ",".join(f"{v:.9g}" for m in models for p in m.parameters() for v in p.flatten().tolist())
    return accelerator, digest(*models)


Result = tuple[tuple[Any, str], Any, int]


def loop(
    make: Callable[..., Any], clip: str = "", scale: bool = False, accumulate: int = 3, samples: int = SAMPLES,
    **options: Any,
) -> Result:  # fmt: skip
    """The plain loop."""
    accelerator = make(gradient_accumulation_steps=accumulate, **options)
    if scale:  # Accelerate makes one on GPUs only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=5)
    model = net(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    split = bool(options.get("dataloader_config") and options["dataloader_config"].split_batches)
    data, unseen = loader(batch_size=8 if split else 4, samples=samples), DataLoader(loader().dataset, 8)
    model, optimizer, data, unseen, schedule = accelerator.prepare(model, optimizer, data, unseen, schedule)
    steps = 0
    for _ in range(EPOCHS):
        model.train()
        for (x,) in data:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), target(x))
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip == "norm":
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                elif accelerator.sync_gradients and clip == "value":
                    accelerator.clip_grad_value_(model.parameters(), 0.05)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped
        model.eval()
        with torch.no_grad():
            seen = [accelerator.gather_for_metrics(x) for (x,) in unseen]
        assert len(torch.cat(seen)) == SAMPLES, len(torch.cat(seen))
    return shown(accelerator, model), schedule.get_last_lr()[0], steps


def no_sync(make: Callable[..., Any]) -> Result:
    """Accumulation by hand, with no_sync and trigger_sync_in_backward."""
    accelerator = make()
    model = net(2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    model, optimizer, data = accelerator.prepare(model, optimizer, loader())
    steps = 0
    for _ in range(EPOCHS):
        batches = iter(data)
        while True:
            three = [x for _, (x,) in zip(range(3), batches, strict=False)]
            if len(three) < 3:
                break
            with accelerator.no_sync(model):
                first, second = (F.mse_loss(model(x), target(x)) for x in three[:2])
                if steps % 2:
                    accelerator.backward(first)
            if steps % 2:
                loss = F.mse_loss(model(three[2]), target(three[2]))
                accelerator.backward(loss)
            else:
                accelerator.backward(first)
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(second)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return shown(accelerator, model), 0.0, steps


def gan(make: Callable[..., Any]) -> Result:
    """Two models, two optimizers, two steps per batch."""
    accelerator = make(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    one, two = nn.Linear(3, 3), nn.Linear(3, 1)
    set_seed(3)
    for p in (*one.parameters(), *two.parameters()):
        nn.init.normal_(p)
    first, second = torch.optim.AdamW(one.parameters(), 1e-2), torch.optim.SGD(two.parameters(), 1e-2)
    one, two, first, second, data = accelerator.prepare(one, two, first, second, loader())
    steps = 0
    for _ in range(EPOCHS):
        for (x,) in data:
            accelerator.backward(F.mse_loss(two(one(x).detach()), target(x)))
            second.step()
            second.zero_grad()
            accelerator.backward(two(one(x)).square().mean())
            first.step()
            first.zero_grad()
            second.zero_grad()
            steps += 2
    return shown(accelerator, one, two), 0.0, steps


def pair(make: Callable[..., Any]) -> Result:
    """Two models, two backward passes, then two steps."""
    accelerator = make()
    one, two = net(5), net(6)
    first, second = torch.optim.SGD(one.parameters(), 1e-2), torch.optim.SGD(two.parameters(), 1e-2)
    one, two, first, second, data = accelerator.prepare(one, two, first, second, loader())
    steps = 0
    for _ in range(EPOCHS):
        for (x,) in data:
            accelerator.backward(F.mse_loss(one(x), target(x)))
            accelerator.backward(F.mse_loss(two(x), target(x)))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
    return shown(accelerator, one, two), 0.0, steps


def two(make: Callable[..., Any]) -> Result:
    """One backward, two optimizers on parts of one model; no prepared loader."""
    accelerator = make()
    model = net(4)
    halves = list(model.parameters())
    first, second = torch.optim.AdamW(halves[:3], 1e-2), torch.optim.SGD(halves[3:], 1e-2)
    model, first, second = accelerator.prepare(model, first, second)
    ranks, rank = int(os.environ.get("READERS", "1")), int(os.environ.get("READER", "0"))
    steps = 0
    for step in range(20):
        numbers = torch.arange(4) + 4 * (step * ranks + rank)
        x = torch.stack([numbers % 7, numbers % 11, numbers % 13], 1) / 10
        accelerator.backward(F.mse_loss(model(x), target(x)))
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        steps += 1
    return shown(accelerator, model), 0.0, steps


def data_config(**settings: bool) -> Any:
    return DataLoaderConfiguration(use_seedable_sampler=True, **settings)


MODES: dict[str, Callable[..., Result]] = {
    "norm": lambda make: loop(make, "norm"),
    "value": lambda make: loop(make, "value", accumulate=1),
    "bf16": lambda make: loop(make, "norm", mixed_precision="bf16"),
    "scaler": lambda make: loop(make, "", scale=True, accumulate=2),
    "split": lambda make: loop(make, "norm", dataloader_config=data_config(split_batches=True)),
    # The last batches of an epoch are filled up differently: there are none to fill up.
    "dispatch": lambda make: loop(make, "norm", samples=80, dataloader_config=data_config(dispatch_batches=True)),
    "dispatch_split": lambda make: loop(
        make, samples=80, dataloader_config=data_config(dispatch_batches=True, split_batches=True)
    ),
    "no_sync": no_sync,
    "gan": gan,
    "pair": pair,
    "two": two,
}


def main() -> None:
    torch.set_num_threads(1)
    for word in sys.argv[1:]:
        mode, _, where = word.partition("=")
        port, _, lighthouse = where.partition("#")
        os.environ["MASTER_PORT"] = port
        options: dict[str, Any] = {"cpu": True}
        kind: Any = Accelerator
        if lighthouse != "-":
            from ft_accelerate import FaultTolerancePlugin, FaultTolerantAccelerator

            kind = FaultTolerantAccelerator
            options["fault_tolerance_plugin"] = FaultTolerancePlugin(lighthouse=lighthouse)

        def make(*, kind: Any = kind, base: dict[str, Any] = options, **more: Any) -> Any:
            return kind(**{"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True), **base, **more})

        set_seed(11)
        (accelerator, text), lr, steps = MODES[mode](make)
        accelerator.wait_for_everyone()
        accelerator.end_training()
        print(mode, text, f"{lr:.12g}", steps, flush=True)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()


if __name__ == "__main__":
    main()
