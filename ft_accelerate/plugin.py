"""`FaultTolerancePlugin`: what a user may say about fault tolerance, in Accelerate's own manner.

How it works. A dataclass: arguments that are given win; fields left None are filled from `ACCELERATE_FT_*` (which
`ft-accelerate launch` sets from its command line and YAML), then from the `fault_tolerance_config` section of the file
that `config_file` or `ACCELERATE_FT_CONFIG_FILE` names. What is None after that is ft_core's own default, which the
FT_* variables of ftrun may set. So: command line > YAML > environment > default.

`FIELDS` lists them all; command line options, questions and the YAML section are generated from it. A field's metadata:
`help`; `env`, its variable; `per_group` if its value differs from group to group, so that it belongs into no file.

Threads: the calling one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from ft_core.data.scaling import LearningRateScaling
from ft_core.errors import ConfigError
from ft_core.settings import MAX_REPLICAS, Environment, parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping

P = TypeVar("P")
SECTION = "fault_tolerance_config"
"""Of the YAML file."""
PREFIX = "ACCELERATE_FT_"
FILE_VARIABLE = f"{PREFIX}CONFIG_FILE"
LAUNCHED = ("FT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE", "FT_REPLICA_GROUP")
"""One of these in the environment means that a replica group was started."""
NEEDS = {
    "global_batch_size": "elastic_data", "max_micro_steps": "global_batch_size", "lr_scaling": "reference_batch_size",
    "reference_batch_size": "lr_scaling",
}  # fmt: skip
"""Fields that mean something only beside another one."""
CHOICES = {"lr_scaling": ("linear", "sqrt"), "on_exhausted": ("shadow", "leave", "stop_all")}
YES, NO = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")


def _option(help_text: str, *, env: str, per_group: bool = False) -> Any:
    return dataclasses.field(
        default=None, metadata={"help": help_text, "env": f"{PREFIX}{env}", "per_group": per_group}
    )


def _names_the_unknown(plugin: type[P]) -> type[P]:
    """An argument that the dataclass does not have is answered with the nearest one."""
    init = plugin.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in FIELDS:
                raise ConfigError(f"{plugin.__name__} has no argument {name}{_hint(name, FIELDS)}")
        init(self, *args, **kwargs)

    plugin.__init__ = __init__  # type: ignore[method-assign]
    return plugin


@_names_the_unknown
@dataclass
class FaultTolerancePlugin:
    """Settings of fault-tolerant training; pass it as `FaultTolerantAccelerator(fault_tolerance_plugin=...)`.

    Args:
        enabled: whether to train fault-tolerantly. Without a plugin: if the process belongs to a replica group (ftrun,
            `ft-accelerate launch`, FT_LIGHTHOUSE); with one: yes.
        lighthouse: host:port of the lighthouse.
        replica_group: number of this replica group in the job, from 0.
        expected_replicas: replica groups of the complete job; the training data is divided by them.
        replica_id: stable name of this group.
        min_replicas: groups in the smallest quorum that may train.
        timeout_s: seconds a collective may wait for a silent peer; all other durations are derived from it.
        quorum_timeout_s: seconds that forming a quorum may take.
        connect_timeout_s: seconds that the lighthouse may take to be reached.
        parity_check_every: compare digests of all state every so many commits; 0: never.
        max_retries: more vetoed steps in a row than this end the process; None: never.
        from_scratch: whether the job may begin again at step 0 if every group that held its state is lost and no
            checkpoint is loaded; otherwise it ends. None: FT_FROM_SCRATCH, else no.
        elastic_data: training data is divided anew in each step among the groups that are there, so that each sample
            goes into exactly one committed step of an epoch.
        global_batch_size: with elastic data, samples in each optimizer step whatever the membership.
        max_micro_steps: with global_batch_size, more micro-batches per step and process than this are refused.
        lr_scaling: "linear" or "sqrt": learning rates follow the samples of each step.
        reference_batch_size: with lr_scaling, samples in the steps for which the learning rates were chosen.
        on_exhausted: what a replica does that is out of batches before the others: "shadow", "leave" or "stop_all".
        share_evaluation: evaluation and prediction data is divided among the groups; `gather_for_metrics` in the loop
            returns what all have, in the order of the data, also if some are lost. Else each group reads all of it.
        config_file: YAML file with a `fault_tolerance_config` section, for what is not said otherwise.

    Raises:
        ConfigError: a value, from wherever it came, cannot work; names it and what to do.
    """

    enabled: bool | None = _option("Whether to train fault-tolerantly.", env="ENABLED")
    lighthouse: str | None = _option(
        "host:port of the lighthouse; the launcher starts one if none is named.", env="LIGHTHOUSE"
    )
    replica_group: int | None = _option(
        "Number of this replica group in the job, from 0.", env="REPLICA_GROUP", per_group=True
    )
    expected_replicas: int | None = _option(
        "Replica groups of the complete job; the training data is divided by them.", env="EXPECTED_REPLICAS"
    )
    replica_id: str | None = _option("Stable name of this replica group.", env="REPLICA_ID", per_group=True)
    min_replicas: int | None = _option("Replica groups in the smallest quorum that may train.", env="MIN_REPLICAS")
    timeout_s: float | None = _option(
        "Seconds a collective may wait for a silent peer; all other durations follow from it.", env="TIMEOUT_S"
    )
    quorum_timeout_s: float | None = _option("Seconds that forming a quorum may take.", env="QUORUM_TIMEOUT_S")
    connect_timeout_s: float | None = _option(
        "Seconds that the lighthouse may take to be reached.", env="CONNECT_TIMEOUT_S"
    )
    parity_check_every: int | None = _option(
        "Compare digests of all state every so many commits; 0: never.", env="PARITY_CHECK_EVERY"
    )
    max_retries: int | None = _option(
        "More vetoed steps in a row than this end the process; not set: never.", env="MAX_RETRIES"
    )
    from_scratch: bool | None = _option(
        "Let the job begin again at step 0 if all its state is lost and no checkpoint is loaded; otherwise it ends.",
        env="FROM_SCRATCH",
    )
    elastic_data: bool | None = _option(
        "Divide training data anew in each step among the groups that are there: each sample once per epoch.",
        env="ELASTIC_DATA",
    )
    global_batch_size: int | None = _option(
        "With elastic data: samples in each optimizer step, whatever the membership.", env="GLOBAL_BATCH_SIZE"
    )
    max_micro_steps: int | None = _option(
        "With global_batch_size: refuse more micro-batches per step and process than this.", env="MAX_MICRO_STEPS"
    )
    lr_scaling: str | None = _option(
        "Learning rates follow the samples of each step: linear or sqrt; needs reference_batch_size.", env="LR_SCALING"
    )
    reference_batch_size: int | None = _option(
        "With lr_scaling: samples in the steps for which the learning rates were chosen.", env="REFERENCE_BATCH_SIZE"
    )
    on_exhausted: str | None = _option(
        "What a replica does that is out of batches before the others: shadow, leave or stop_all.", env="ON_EXHAUSTED"
    )
    share_evaluation: bool | None = _option(
        "Divide evaluation data among the groups; gather_for_metrics returns what all have.", env="SHARE_EVALUATION"
    )
    config_file: str | None = _option(
        f"YAML file with a {SECTION} section, for what is not said otherwise.", env="CONFIG_FILE", per_group=True
    )

    def __post_init__(self) -> None:
        environment = from_environment(os.environ)
        for name, value in environment.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name, value in from_file(self.config_file).items() if self.config_file else ():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name in FIELDS:
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, check(name, value, name))
        self._check_together()

    def _check_together(self) -> None:
        for name, needs in NEEDS.items():
            if getattr(self, name) is not None and not getattr(self, needs):
                raise ConfigError(f"{name}={getattr(self, name)!r} has no effect without {needs}: set {needs}, too")

    @property
    def group(self) -> int:
        """Number of this replica group: `replica_group`, else FT_REPLICA_GROUP, else 0."""
        number = self.replica_group
        return number if number is not None else Environment.read(os.environ).replica_group or 0

    @property
    def groups(self) -> int:
        """Replica groups of the complete job, and never fewer than this one's number needs."""
        total = self.expected_replicas or Environment.read(os.environ).num_replica_groups or 1
        return max(total, self.group + 1)

    @property
    def name(self) -> str:
        """Stable name of this replica group: `replica_id`, else FT_REPLICA_ID, else one made of its number."""
        return self.replica_id or Environment.read(os.environ).replica_id or f"replica-{self.group}"

    @property
    def address(self) -> str:
        """Of the lighthouse; "" if nobody said."""
        return self.lighthouse or Environment.read(os.environ).lighthouse or ""

    @property
    def scaling(self) -> LearningRateScaling | None:
        """What learning rates are multiplied with; None: nothing."""
        if self.lr_scaling is None:
            return None
        assert self.reference_batch_size is not None
        return LearningRateScaling(self.lr_scaling, self.reference_batch_size)

    def for_manager(self) -> dict[str, Any]:
        """Keyword arguments of `ft_core.Manager`; what nobody said is left to its own defaults."""

        def span(seconds: float | None) -> timedelta | None:
            return None if seconds is None else timedelta(seconds=seconds)

        return {
            "lighthouse_addr": self.lighthouse, "replica_id": self.name, "min_replica_size": self.min_replicas,
            "expected_replicas": self.expected_replicas, "timeout": span(self.timeout_s),
            "quorum_timeout": span(self.quorum_timeout_s), "connect_timeout": span(self.connect_timeout_s),
            "parity_check_every": self.parity_check_every or 0, "max_retries": self.max_retries,
            "on_exhausted": self.on_exhausted or "shadow", "from_scratch": self.from_scratch,
        }  # fmt: skip


FIELDS: Mapping[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(FaultTolerancePlugin)}
"""Every setting by name."""
KINDS: Mapping[str, type] = {
    name: next(kind for kind in hint.__args__ if kind is not type(None))
    for name, hint in get_type_hints(FaultTolerancePlugin).items()
}
"""bool, int, float or str for each of FIELDS."""


def variable(name: str) -> str:
    """Environment variable of a field: "min_replicas" -> "ACCELERATE_FT_MIN_REPLICAS"."""
    return str(FIELDS[name].metadata["env"])


def plugin_or_none(given: FaultTolerancePlugin | None) -> FaultTolerancePlugin | None:
    """The plugin in force; None if fault tolerance is off.

    Args:
        given: the user's, or None.

    Raises:
        ConfigError: `given` is something else, or the environment cannot work.
    """
    if given is not None and not isinstance(given, FaultTolerancePlugin):
        raise ConfigError(
            f"fault_tolerance_plugin must be a ft_accelerate.FaultTolerancePlugin, got {type(given).__name__}"
        )
    ours = any(name.startswith(PREFIX) and os.environ[name] for name in os.environ)
    started = given is not None or ours or any(os.environ.get(name) for name in LAUNCHED)
    if not started:
        return None
    plugin = given or FaultTolerancePlugin()
    return None if plugin.enabled is False else plugin


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """What `ACCELERATE_FT_*` say, by field.

    Raises:
        ConfigError: a variable is unknown, or its value cannot work.
    """
    known = {variable(name): name for name in FIELDS}
    found: dict[str, Any] = {}
    for key, text in environ.items():
        if not key.startswith(PREFIX) or not text:
            continue
        if key not in known:
            raise ConfigError(f"environment variable {key} is not known to ft_accelerate{_hint(key, known)}")
        found[known[key]] = check(known[key], text, key)
    return found


def from_file(path: str) -> dict[str, Any]:
    """What the section of a YAML file says, by field; {} if it has none.

    Raises:
        ConfigError: the file cannot be read, or what it says cannot work.
    """
    import yaml

    from ft_accelerate import config  # it knows the launcher's keys, and with them this module

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader=yaml.BaseLoader)  # texts: `replicas: 2:8` is no number
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    section = content.get(SECTION) if isinstance(content, dict) else None
    values = config.check(section or {}, path)  # other keys of the section are the launcher's
    return {name: value for name, value in values.items() if name in FIELDS}


def check(name: str, value: object, source: str) -> Any:
    """The value of a field in its type; texts, as from the environment, are read.

    Args:
        name: of the field.
        value: as given.
        source: where it was given, for the message.

    Raises:
        ConfigError: it cannot work; names `source`, the value and what it must be.
    """
    read = _read(KINDS[name], value, source)
    if name == "lighthouse":
        parse_address(read, source)
    if name in CHOICES and read not in CHOICES[name]:
        near = difflib.get_close_matches(read, CHOICES[name], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{source}={value!r} must be one of {', '.join(CHOICES[name])}{hint}")
    lowest = {
        "min_replicas": 1, "expected_replicas": 1, "replica_group": 0, "parity_check_every": 0, "max_retries": 0,
        "global_batch_size": 1, "max_micro_steps": 1, "reference_batch_size": 1,
    }  # fmt: skip
    if name in lowest and read < lowest[name]:
        raise ConfigError(f"{source}={value!r} must be a whole number, {lowest[name]} or more")
    if name in ("min_replicas", "expected_replicas") and read > MAX_REPLICAS:
        raise ConfigError(f"{source}={value!r}: a quorum holds at most {MAX_REPLICAS} groups")
    if name.endswith("_s") and not 0 < read < float("inf"):
        raise ConfigError(f"{source}={value!r} must be a number of seconds, more than 0")
    return read


def _read(kind: type, value: object, source: str) -> Any:
    text = str(value).strip()
    if kind is bool:
        if text.lower() not in YES + NO:
            raise ConfigError(f"{source}={value!r} must be true or false")
        return text.lower() in YES
    if kind is str:
        if not isinstance(value, str):
            raise ConfigError(f"{source}={value!r} must be a text")
        return value
    wanted = "a whole number" if kind is int else "a number"
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError
        return kind(text)
    except ValueError:
        raise ConfigError(f"{source}={value!r} must be {wanted}") from None


def _hint(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else f" (known: {', '.join(sorted(known))})"
