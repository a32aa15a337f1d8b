"""`FixedOrderDataParallel`: the same losses and weights, bit for bit, whatever fails and however many replicas run.

How it works. Each of these would make a run depend on its membership, and is taken care of:

- What a step consists of: an `ElasticDataLoader` with `fixed_micro_batches=True` cuts each step of `global_batch_size`
  samples into the same micro-batches, with the same numbers, and deals them out whole. A vetoed step is done again.
- The order of additions: `reduction.fixed_order` adds the micro-batches' gradients along a tree over their numbers.
- Random numbers: the process' generators (torch's, `random`, numpy's if it is loaded) are seeded from
  (the loader's seed, the micro-batch's samples) when a micro-batch is handed out. `data.seeded_dataset` does so for
  random augmentation in the dataset.
- Buffers that forward changes: refused.
- The machine's arithmetic: deterministic algorithms are demanded; torch's version, the number of threads and the kind
  of hardware are part of the plan, so that the room refuses a replica in which they differ.

Invariant: nothing that a replica adds to a committed step depends on who its peers are or on how it came there.
Threads: the training thread; hooks: see `reduction.fixed_order`.
"""

from __future__ import annotations

import contextlib
import math
import platform
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from ft_core.data import ElasticDataLoader, ElasticSampler
from ft_core.data.seeded_dataset import seed_from
from ft_core.errors import ConfigError, UsageError
from ft_core.reduction.bucket_plan import BucketPlan, BucketSettings
from ft_core.reduction.ddp_arguments import DEFAULT_CAPS_BYTES, Options, take_inventory
from ft_core.reduction.fixed_order.reducer import FixedOrderReducer
from ft_core.reduction.parameter_watch import ParameterWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ft_core.data.open_step import OpenStep
    from ft_core.data.step_division import MicroBatch
    from ft_core.manager import Manager

__all__ = ["FixedOrderDataParallel"]


@dataclass(frozen=True)
class FixedOrderPlan(BucketPlan):
    """A plan that differs where sums would: its digest keeps replicas that compute otherwise out of the room."""

    arithmetic: str = ""

    def describe(self) -> list[str]:
        """The lines of a plan, and how this replica computes."""
        return [*super().describe(), f"summed in the order of micro-batches; {self.arithmetic}"]


class FixedOrderDataParallel(nn.Module):
    """Sums the gradients of a step's micro-batches in the order of their numbers, over whoever takes part.

    A training loop runs forward and backward once per micro-batch, and steps the optimizer after the last one:

        for batch in loader:
            loss = loss_of(model, batch)   # a mean over the micro-batch
            model.record_loss(loss)        # optional: `step_loss` is then the step's mean
            loss.backward()
            if loader.last_micro_batch:
                optimizer.step()

    Gradients are those of the mean over the step's samples, final when the last `backward()` returns: clip before
    `optimizer.step()`. A parameter that no micro-batch of the step used has the gradient None.

    Args:
        manager: the `Manager`, before its first start_quorum, of a replica group of one rank.
        module: what is trained. Its parameters are on one device; they may be frozen later, not unfrozen.
        loader: the loader (or sampler) of the training data, with `fixed_micro_batches=True`.

    Raises:
        ConfigError: something about the module, the loader, the Manager or torch's settings cannot work; it says what.
    """

    def __init__(self, manager: Manager, module: nn.Module, loader: ElasticDataLoader | ElasticSampler) -> None:
        super().__init__()
        sampler = _sampler_of(loader)
        _check_group(manager, sampler)
        _check_determinism(module)
        self._statistics = [(name or type(module).__name__, part) for name, part in _statistics(module)]
        if names := self._counting():
            raise ConfigError(_STATISTICS.format(names))
        settings = BucketSettings(DEFAULT_CAPS_BYTES, find_unused=True, broadcast_buffers=False)
        inventory = take_inventory(module, Options(None, None, sync_buffers=False, may_freeze=True, buckets=settings))
        if len(inventory.devices) > 1:
            places = ", ".join(map(str, inventory.devices))
            raise ConfigError(f"FixedOrderDataParallel: the parameters are on {places}; put them on one device")
        self.module = module
        self.device = inventory.devices[0]
        self._sampler, self._manager = sampler, manager
        self._frozen = inventory.frozen
        self._watch = ParameterWatch(module, (*inventory.trained, *inventory.frozen), inventory.ignored)
        self._settings = _settings()
        base = inventory.plan
        plan = FixedOrderPlan(
            base.parameters, base.buffers, base.settings, base.buckets, base.tail, arithmetic=_arithmetic(self.device)
        )
        batching = sampler.batching
        self._max_count = math.ceil(batching.step_size(1) / batching.batch_size)
        sampler.attach(manager)
        manager.require_all_contributions()
        sampler.watch(self._begin)
        self._reducer = FixedOrderReducer(manager.hooks, inventory.trained, plan, self.device, self._max_count, module)
        try:
            manager.hooks.register_reducer(self._reducer)
        except BaseException:
            self._reducer.remove_hooks()
            sampler.watch(None)
            raise

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Nothing is communicated here."""
        if torch.is_grad_enabled():
            self._check()
        return self.module(*inputs, **kwargs)

    def record_loss(self, loss: Tensor | float) -> None:
        """Take the current micro-batch's mean loss (or any other mean over it) along with its gradient.

        Raises:
            UsageError: there is no micro-batch, it has one already, or `loss` is not one number.
        """
        self._reducer.record_loss(torch.as_tensor(loss))

    @property
    def step_loss(self) -> float | None:
        """Mean of the recorded losses over all samples of the last step that this replica committed; None: unrecorded.

        Equal on all replicas. A replica that healed over a step has no loss of it.
        """
        return self._reducer.committed_loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing: only the last micro-batch of a step is followed by communication."""
        yield

    def unwrap(self) -> nn.Module:
        """Undo the wrapping: remove the hooks, unregister from the Manager, return the module."""
        self._reducer.remove_hooks()
        self._sampler.watch(None)
        self._manager.hooks.unregister_reducer(self._reducer)
        return self.module

    def _begin(self, step: OpenStep, micro: MicroBatch) -> None:
        """The loader hands out a micro-batch."""
        plan = step.plan
        count = math.ceil(plan.samples / plan.batching.batch_size)
        self._reducer.begin(micro, first=step.handed_out == 0, count=count, samples=plan.samples)
        _seed(seed_from(f"{self._sampler.seed} {micro.epoch} {micro.ranges}"), self.device)

    def _check(self) -> None:
        now = _settings()
        if now != self._settings:
            raise UsageError(
                f"the module was wrapped with '{self._settings}', now it is '{now}': the trajectory would not be the "
                "same; set this before wrapping and leave it"
            )
        if names := self._counting():
            raise UsageError(_STATISTICS.format(names))
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    "a parameter was unfrozen after the module was wrapped: all replicas must sum the same gradients; "
                    "wrap with it unfrozen and freeze it afterwards"
                )
        if newcomer := self._watch.newcomer():
            raise UsageError(
                f"{newcomer} is trained and was not in the module when it was wrapped: nobody would sum its gradient; "
                "call unwrap() and wrap the module again, on all replicas"
            )

    def _counting(self) -> str:
        """Names of modules whose forward would change running statistics; it does so behind autograd's back."""
        return ", ".join(name for name, part in self._statistics if part.training)

    def __getstate__(self) -> NoReturn:
        raise UsageError("FixedOrderDataParallel holds a live Manager and cannot be copied or pickled; copy .module")


def _sampler_of(loader: object) -> ElasticSampler:
    sampler = loader.sampler if isinstance(loader, ElasticDataLoader) else loader
    if not isinstance(sampler, ElasticSampler):
        raise ConfigError(
            f"FixedOrderDataParallel needs an ElasticDataLoader (or ElasticSampler), got {type(loader).__name__}: "
            "other data is divided differently when the membership changes"
        )
    if not sampler.batching.fixed_micro_batches:
        raise ConfigError(
            "FixedOrderDataParallel needs a loader with global_batch_size=... and fixed_micro_batches=True: else the "
            "micro-batches of a step follow the membership"
        )
    return sampler


def _check_group(manager: Manager, sampler: ElasticSampler) -> None:
    ranks = max(manager._runtime.config.world_size, sampler.num_replicas)
    if ranks > 1:
        raise ConfigError(
            f"FixedOrderDataParallel: a replica group of {ranks} ranks cannot be used; their own collectives add in an "
            "order of their own. Start each rank as a replica group of its own"
        )


def _check_determinism(module: nn.Module) -> None:
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        raise ConfigError(
            "FixedOrderDataParallel needs torch.use_deterministic_algorithms(True), without warn_only: call it first"
        )
    if float(torch.tensor(1e-40) * 0.5) == 0.0:
        raise ConfigError(
            "FixedOrderDataParallel: torch.set_flush_denormal(True) holds for one thread only, not for those that add "
            "up what replicas send; set it to False"
        )
    if torch.backends.cudnn.benchmark and any(p.is_cuda for p in module.parameters()):
        raise ConfigError(
            "FixedOrderDataParallel: torch.backends.cudnn.benchmark=True chooses algorithms by the clock; set it to "
            "False"
        )


def _statistics(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            yield name, part


_STATISTICS = (
    "FixedOrderDataParallel: running statistics are kept by {}; they depend on which replica ran which micro-batch. "
    "Put such modules into eval(), make them with track_running_stats=False, or use GroupNorm or LayerNorm"
)


def _arithmetic(device: torch.device) -> str:
    """What has to be equal on all replicas for equal bits, as far as torch tells."""
    if device.type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        hardware = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__}, {device.type}: {hardware}, {_settings()}"


def _settings() -> str:
    """The part of it that a process may change."""
    return (
        f"{torch.get_num_threads()} threads, matmul precision {torch.get_float32_matmul_precision()}, deterministic "
        f"algorithms {torch.are_deterministic_algorithms_enabled()}"
    )


def _seed(number: int, device: torch.device) -> None:
    """Seed the process' generators, so that what is drawn follows the micro-batch, not the replica.

    Not torch.manual_seed: for kinds of devices that are not in use it keeps a call, with a stack trace, for ever.
    """
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed_all(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)
