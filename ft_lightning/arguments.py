"""The arguments of `FaultTolerantStrategy`, for the Trainer and for Fabric: checked, and passed on.

How it works. `Arguments` is made in the strategy's constructor, so a mistake is reported before anything is started;
`for_manager` gives the arguments of every rank's Manager, `for_ftrun` those of ftrun where the strategy starts it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_core import Manager
from ft_core.addresses import Addresses
from ft_core.data import LearningRateScaling
from ft_core.errors import ConfigError
from ft_core.loop.tools import known_arguments
from ft_lightning.names import NAME

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

OURS = {
    "min_replica_size": "use min_replicas=",
    "timeout": "use timeout=",
    "lighthouse_addr": "use lighthouse=",
    "from_scratch": "use from_scratch=",
    **dict.fromkeys(
        ("pg", "load_state_dict", "state_dict", "use_async_quorum", "warm_up", "rank", "world_size"),
        "the strategy sets it",
    ),
}
"""Arguments of the Manager that `manager_kwargs` may not contain, and why."""
OUR_OPTIONS = {
    "--replicas": "devices= says how many groups are started",
    "--replica": "devices= says how many groups are started",
    "--num-replicas": "devices= says how many groups are started; use ftrun for a part of a bigger job",
    "--replica-offset": "devices= says how many groups are started; use ftrun for a part of a bigger job",
    "--run-id": "the strategy sets it",
    "--gpus": "devices= says which are used",
    "--nproc-per-replica": "each device is a replica group of its own; use ftrun for groups of several processes",
    "--min-replicas": "use min_replicas=",
    "--timeout": "use timeout=",
    "--from-scratch": "use from_scratch=True",
    "--lighthouse": "use lighthouse=, and ftrun to start the processes",
}
"""Options that `ftrun_options` may not contain, and why."""

DDP_ONLY = {
    **dict.fromkeys(
        ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"),
        "gradients are averaged by the Manager, over the groups that take part in the step",
    ),
    "start_method": "processes are started by ftrun, torchrun or, from the script's command line, by `fit`",
    "cluster_environment": "processes are started by ftrun, torchrun or, from the script's command line, by `fit`",
}

UNSUITED = {
    "XLAAccelerator": "TPUs communicate through XLA, which cannot lose a process; use CPUs or GPUs, or strategy='xla'",
    "XLAPrecision": "it is made for strategy='xla'; name the precision instead, for example precision='bf16-mixed'",
    "DeepSpeedPrecision": "it leaves the casting to DeepSpeed's engine, which is not there; name the precision "
    "instead, for example precision='bf16-mixed'",
    "FSDPPrecision": "it leaves the casting to FSDP's wrapper, which is not there; name the precision instead, for "
    "example precision='bf16-mixed'",
}
"""Lightning's accelerators and precision plugins that only work with a strategy of their own, and what to do."""


@dataclass(frozen=True)
class Arguments:
    """Those of the strategy that are not Lightning's. `strategy.FaultTolerance` documents them."""

    min_replicas: int | None = None
    timeout: timedelta | float | None = None
    lighthouse: str | None = None
    manager_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ftrun_options: Sequence[str] = ()
    from_scratch: bool | None = None

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: names the argument, the value, and what to do.
        """
        number: object = self.min_replicas
        seconds = self.timeout_s
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigError(f"min_replicas={number!r} must be a whole number, 1 or more: the smallest quorum")
        if seconds is not None and (isinstance(seconds, bool | str) or not 0 < seconds < float("inf")):
            raise ConfigError(f"timeout={self.timeout!r} must be a timedelta or a number of seconds, more than 0")
        if self.lighthouse is not None:
            Addresses.parse(self.lighthouse, "lighthouse")
        if self.from_scratch is not None and not isinstance(self.from_scratch, bool):
            raise ConfigError(
                f"from_scratch={self.from_scratch!r} must be True (the job may begin again at step 0 if all its state "
                "is lost), False, or left out (FT_FROM_SCRATCH says it)"
            )
        if not isinstance(self.manager_kwargs, Mapping):
            raise ConfigError(f"manager_kwargs={self.manager_kwargs!r} must be a dict such as {{'max_retries': 100}}")
        known = set(inspect.signature(Manager.__init__).parameters) - {"self"}
        for name in self.manager_kwargs:
            if name in OURS:
                raise ConfigError(f"manager_kwargs: {name} cannot be given: {OURS[name]}")
            if name not in known:
                near = difflib.get_close_matches(name, known - set(OURS), 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"manager_kwargs: ft_core.Manager has no argument {name}{hint}")
        if isinstance(self.ftrun_options, str):
            raise ConfigError(f"ftrun_options={self.ftrun_options!r} must be a list such as ['--standby', '1']")
        if self.ftrun_options:
            check_options([str(word) for word in self.ftrun_options])

    @property
    def timeout_s(self) -> float | None:
        """`timeout` in seconds."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout

    def for_manager(self) -> dict[str, Any]:
        """The keyword arguments of ft_core.Manager that follow from these."""
        seconds = self.timeout_s
        return {
            **self.manager_kwargs,
            "warm_up": False,  # a newcomer takes over the others' position before its first batch
            "min_replica_size": self.min_replicas,
            "timeout": None if seconds is None else timedelta(seconds=seconds),
            "lighthouse_addr": self.lighthouse,
            "from_scratch": self.from_scratch,
        }

    def for_ftrun(self) -> list[str]:
        """The options of ftrun that follow from these."""
        options = [] if self.min_replicas is None else ["--min-replicas", str(self.min_replicas)]
        options += [] if self.timeout_s is None else ["--timeout", f"{self.timeout_s:g}"]
        options += ["--from-scratch"] if self.from_scratch else []
        return [*options, *map(str, self.ftrun_options)]


def check_options(words: list[str]) -> None:
    """Refuse `ftrun_options` that the strategy sets, under whatever name, and what ftrun would not understand.

    Raises:
        ConfigError: names the option, and what to do.
    """
    from ft_core.launch import argument_parser  # half a second, which is only for those who use it

    for word in words:
        option = word.partition("=")[0]
        for name in argument_parser.spellings(option):
            if name in OUR_OPTIONS:
                also = "" if name == option.replace("_", "-") else f" (as {option})"
                raise ConfigError(f"ftrun_options: {name}{also} cannot be given: {OUR_OPTIONS[name]}")
    try:
        left = argument_parser.read([*words, "--", "script"])
    except ConfigError as error:
        raise ConfigError(f"ftrun_options={words!r}: {error}") from None
    if left.script != "script":
        raise ConfigError(
            f"ftrun_options={words!r}: {left.script!r} is neither an option nor the value of one; the script and its "
            "arguments are those that run here"
        )


POLICIES = ("shadow", "stop_all", "leave")


@dataclass(frozen=True)
class DataArguments:
    """Those about the training data. `strategy.FaultTolerance` documents them."""

    elastic_data: bool = False
    global_batch_size: int | None = None
    max_micro_steps: int | None = None
    lr_scaling: str | None = None
    reference_batch_size: int | None = None
    on_exhausted: str | None = None
    share_evaluation: bool = False

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: names the argument, the value, and what to do.
        """
        for name in ("elastic_data", "share_evaluation"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("global_batch_size", "max_micro_steps"):
            value: object = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number, 1 or more")
            if not self.elastic_data:
                raise ConfigError(
                    f"{name}={value} is for elastic_data=True; an ElasticDataLoader of your own takes it itself"
                )
        if self.max_micro_steps is not None and self.global_batch_size is None:
            raise ConfigError(
                f"max_micro_steps={self.max_micro_steps} bounds what global_batch_size= asks of a replica; without it "
                "use accumulate_grad_batches"
            )
        if self.on_exhausted is not None and self.on_exhausted not in POLICIES:
            raise ConfigError(f"on_exhausted={self.on_exhausted!r} must be one of {', '.join(map(repr, POLICIES))}")
        if self.on_exhausted is not None and self.elastic_data:
            raise ConfigError(
                f"on_exhausted={self.on_exhausted!r} with elastic_data=True: with elastic data all replicas run out "
                "together; leave on_exhausted out"
            )
        _ = self.scaling

    @property
    def scaling(self) -> LearningRateScaling | None:
        """The rule by which learning rates follow the samples of each step; None: they do not.

        Raises:
            ConfigError: one of the two arguments cannot work.
        """
        if (self.lr_scaling is None) != (self.reference_batch_size is None):
            raise ConfigError(
                f"lr_scaling={self.lr_scaling!r} with reference_batch_size={self.reference_batch_size!r}: pass both, "
                "the rule and the samples per step for which the learning rates were chosen"
            )
        if self.lr_scaling is None or self.reference_batch_size is None:
            return None
        if self.lr_scaling not in ("linear", "sqrt"):
            raise ConfigError(f"lr_scaling={self.lr_scaling!r} must be 'linear' or 'sqrt'")
        return LearningRateScaling(self.lr_scaling, self.reference_batch_size)


def check_fabric(kwargs: Mapping[str, Any]) -> None:
    """Refuse what only the Trainer's loop can do.

    Raises:
        ConfigError: there is such an argument; says what to write instead.
    """
    for item in fields(DataArguments):
        if item.name == "share_evaluation" and item.name in kwargs:
            raise ConfigError(
                f"share_evaluation={kwargs[item.name]!r} is for the Trainer: with Fabric the loop is yours; divide it "
                "with ft_core.loop.shared_work.SharedWork(fabric.strategy.manager)"
            )
        if item.name in kwargs:
            raise ConfigError(
                f"{item.name}={kwargs[item.name]!r} is for the Trainer: with Fabric the loop is yours; iterate "
                "ft_core.data.ElasticDataLoader(dataset, manager=fabric.strategy.manager) itself, and see "
                "docs/elastic-data.md"
            )


def check_kwargs(kwargs: Mapping[str, Any], strategy: type) -> None:
    """Refuse arguments of Lightning's DDPStrategy that mean nothing here, and those that nobody knows.

    Args:
        kwargs: those that are not named in the strategy's signature.
        strategy: the class; its bases are Lightning's.

    Raises:
        ConfigError: there is one; says why, or which name was meant.
    """
    bases = (base for base in strategy.__mro__ if "__init__" in vars(base))
    known = known_arguments().union(*(inspect.signature(vars(base)["__init__"]).parameters for base in bases))
    check_known(kwargs, strategy, known | set(DDP_ONLY))
    for name, why in DDP_ONLY.items():
        if kwargs.get(name) not in (None, "popen"):
            raise ConfigError(f"{name}={kwargs[name]!r} cannot be used with strategy='fault_tolerant': {why}")


def check_known(kwargs: Mapping[str, Any], strategy: type, known: Collection[str]) -> None:
    """Refuse arguments that nobody knows.

    Args:
        kwargs: those that are not named in the strategy's signature.
        strategy: the class.
        known: names that it takes besides.

    Raises:
        ConfigError: there is one; says which name was meant.
    """
    ours = set(inspect.signature(strategy).parameters) - {"kwargs"}
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, ours, 1) or difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}=?" if near else f" (it has {', '.join(sorted(ours))})"
            raise ConfigError(f"{strategy.__name__} has no argument {name}{hint}")


def check_surroundings(*parts: object, strategy: str = NAME) -> None:
    """Refuse accelerators and plugins that our kinds of training do not go with: Lightning takes most of them.

    Args:
        parts: as Lightning has made them, or the user.
        strategy: its name.

    Raises:
        ConfigError: one cannot work; says why and what to do.
    """
    for part in parts:
        for kind in type(part).__mro__:
            if kind.__name__ in UNSUITED:
                raise ConfigError(
                    f"{type(part).__name__} cannot be used with strategy={strategy!r}: {UNSUITED[kind.__name__]}"
                )
