"""`FaultTolerancePlugin`: what a user may say about fault tolerance, in Accelerate's own manner.

How it works. A dataclass: arguments that are given win; fields left None are filled from `ACCELERATE_FT_*` (which
`ft-accelerate launch` sets from its command line and YAML), then from the `fault_tolerance_config` section of the file
that `config_file` or `ACCELERATE_FT_CONFIG_FILE` names. What is None after that is ft_core's own default, which the
FT_* variables of ftrun may set. So: command line > YAML > environment > default.

The fields themselves are `options.PluginFields`.

Threads: the calling one.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ft_accelerate.options import FIELDS, OPTIONS, PREFIX, SECTION, PluginFields, check, suggestion, variable
from ft_core.data.scaling import LearningRateScaling
from ft_core.errors import ConfigError
from ft_core.settings import Environment

if TYPE_CHECKING:
    from collections.abc import Mapping

P = TypeVar("P")
LAUNCHED = ("FT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE", "FT_REPLICA_GROUP")
"""One of these in the environment means that a replica group was started."""
LAUNCHERS = frozenset(option.env for option in OPTIONS.values() if option.launcher)
"""Variables of `ft-accelerate launch` alone, which mean nothing to a process that something else has started."""
NEEDS = {
    "global_batch_size": "elastic_data", "max_micro_steps": "global_batch_size", "lr_scaling": "reference_batch_size",
    "reference_batch_size": "lr_scaling",
}  # fmt: skip
"""Fields that mean something only beside another one."""


def _names_the_unknown(plugin: type[P]) -> type[P]:
    """An argument that the dataclass does not have is answered with the nearest one."""
    init = plugin.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in FIELDS:
                raise ConfigError(f"{plugin.__name__} has no argument {name}{suggestion(name, FIELDS)}")
        init(self, *args, **kwargs)

    plugin.__init__ = __init__  # type: ignore[method-assign]
    return plugin


@_names_the_unknown
@dataclass
class FaultTolerancePlugin(PluginFields):
    """Settings of fault-tolerant training; pass it as `FaultTolerantAccelerator(fault_tolerance_plugin=...)`.

    Args:
        enabled: whether to train fault-tolerantly. Without a plugin: if the process belongs to a replica group (ftrun,
            `ft-accelerate launch`, FT_LIGHTHOUSE); with one: yes.
        lighthouse: host:port of the lighthouse, or of two with a comma between.
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
        """The address of the lighthouse; "" if none is given."""
        return self.lighthouse or Environment.read(os.environ).lighthouse or ""

    @property
    def scaling(self) -> LearningRateScaling | None:
        """The rule by which learning rates follow the samples of each step; None: they do not."""
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
    ours = any(name.startswith(PREFIX) and text and name not in LAUNCHERS for name, text in os.environ.items())
    started = given is not None or ours or any(os.environ.get(name) for name in LAUNCHED)
    if not started:
        return None
    plugin = given or FaultTolerancePlugin()
    return None if plugin.enabled is False else plugin


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of `ACCELERATE_FT_*`, by field.

    Raises:
        ConfigError: a variable is unknown, or its value cannot work.
    """
    known = {variable(name): name for name in FIELDS}
    found: dict[str, Any] = {}
    for key, text in environ.items():
        if not key.startswith(PREFIX) or not text or key in LAUNCHERS:
            continue
        if key not in known:
            there_are = suggestion(key, {*known, *LAUNCHERS})
            raise ConfigError(f"environment variable {key} is not known to ft_accelerate{there_are}")
        found[known[key]] = check(known[key], text, key)
    return found


def from_file(path: str) -> dict[str, Any]:
    """The values in the section of a YAML file, by field; {} if it has none.

    Raises:
        ConfigError: the file cannot be read, or what it says cannot work.
    """
    import yaml

    from ft_accelerate.yaml_config import check as checked  # with the commands of accelerate: heavy, like yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader=yaml.BaseLoader)  # texts: `replicas: 2:8` is no number
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    section = content.get(SECTION) if isinstance(content, dict) else None
    values = checked(section or {}, path)  # other keys of the section are the launcher's
    return {name: value for name, value in values.items() if name in FIELDS}
