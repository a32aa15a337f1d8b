"""Every option of fault tolerance: what it is called in each place, and which values it takes.

How it works. `PluginFields` is what every process is given (`FaultTolerancePlugin` adds where values come from), and
`LaunchSettings` how replica groups are started. `OPTIONS` joins the two. Flags, questions of `config`, the YAML section
and the variables are generated from it.

A field's metadata: `help`; `env`, its variable; `ftrun`, ftrun's option for it; `per_group` if its value differs from
group to group, so that it belongs into no file.

Pure: values in, values out. Threads: any.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from ft_core.addresses import Addresses
from ft_core.errors import ConfigError
from ft_core.launch.chaos_schedule import ChaosSettings
from ft_core.launch.gpus import MODES
from ft_core.settings import MAX_REPLICAS

SECTION = "fault_tolerance_config"
"""The name of our section of the YAML file."""
PREFIX = "ACCELERATE_FT_"
FLAG = "--ft_"
"""In front of an option's name on the command line, as --fsdp_ is for FSDP's."""
NOT_LAUNCHED = ("config_file", "replica_id")
"""Fields of the plugin that the launcher sets otherwise: launch has accelerate's --config_file, groups have `name`."""
FTRUNS = {
    "lighthouse": "--lighthouse", "min_replicas": "--min-replicas", "timeout_s": "--timeout",
    "expected_replicas": "--num-replicas", "replica_group": "--replica",
}  # fmt: skip
"""Fields of the plugin that are options of ftrun, which gives them to the processes."""
CHOICES = {"lr_scaling": ("linear", "sqrt"), "on_exhausted": ("shadow", "leave", "stop_all")}
YES, NO = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")


def _option(help_text: str, *, env: str, per_group: bool = False) -> Any:
    return dataclasses.field(
        default=None, metadata={"help": help_text, "env": f"{PREFIX}{env}", "per_group": per_group}
    )


@dataclass
class PluginFields:
    """The fields of `FaultTolerancePlugin`, which documents them. None: nobody said. Durations in seconds."""

    enabled: bool | None = _option("Whether to train fault-tolerantly.", env="ENABLED")
    lighthouse: str | None = _option(
        "host:port of the lighthouse, or of two, with a comma; the launcher starts one if none is named.",
        env="LIGHTHOUSE",
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


FIELDS: Mapping[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(PluginFields)}
"""Every setting of the plugin by name."""


def _kinds(settings: type) -> dict[str, type]:
    """bool, int, float or str for each field."""
    return {
        name: next(kind for kind in hint.__args__ if kind is not type(None))
        for name, hint in get_type_hints(settings).items()
    }


KINDS: Mapping[str, type] = _kinds(PluginFields)
"""bool, int, float or str for each of FIELDS."""


def variable(name: str) -> str:
    """Environment variable of a field: "min_replicas" -> "ACCELERATE_FT_MIN_REPLICAS"."""
    return str(FIELDS[name].metadata["env"])


def suggestion(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?', or what there is."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, 1)
    return f"; did you mean {near[0]}?" if near else f" (known: {', '.join(names)})"


def _setting(help_text: str, ftrun: str, *, choices: tuple[str, ...] = (), per_group: bool = False) -> Any:
    return dataclasses.field(
        default=None, metadata={"help": help_text, "ftrun": ftrun, "choices": choices, "per_group": per_group}
    )


@dataclass(frozen=True)
class LaunchSettings:
    """How replica groups are started and supervised on this machine. None: ftrun's default. Durations in seconds."""

    replicas: str | None = _setting(
        "Replica groups to run on this machine: N, or N:MAX to leave room for `ftrun resize`.", "--replicas"
    )
    replica_offset: int | None = _setting(
        "Number of the first replica group on this machine, in a job of several machines.", "--replica-offset",
        per_group=True,
    )  # fmt: skip
    name: str | None = _setting("Replica groups are called NAME-0, NAME-1, ... .", "--name")
    gpus: str | None = _setting(
        "auto: divide the visible GPUs among groups; share: groups may share; all: show all to all; none: hide all.",
        "--gpus", choices=MODES,
    )  # fmt: skip
    max_restarts: int | None = _setting(
        "Restarts of one replica group within restart_window_s; 0: never.", "--max-restarts"
    )
    restart_window_s: float | None = _setting("Seconds after which a restart is forgiven.", "--restart-window")
    crash_loop: int | None = _setting(
        "A group that dies this many times in a row before its first commit is given up.", "--crash-loop"
    )
    standby: int | None = _setting("Processes kept ready with all imports done.", "--standby")
    drain_timeout_s: float | None = _setting(
        "Seconds that a group may take to finish its step and leave.", "--drain-timeout"
    )
    lighthouse_bind: str | None = _setting(
        "host:port where the launcher's own lighthouse listens, for groups on other machines.", "--lighthouse-bind"
    )
    admin_token_file: str | None = _setting(
        "File with the token that the launcher's own lighthouse takes orders to drain and kill with.",
        "--admin-token-file", per_group=True,
    )  # fmt: skip
    local_addr: str | None = _setting("Address at which other machines reach this one.", "--local-addr", per_group=True)
    run_id: str | None = _setting("Name of this run.", "--run-id", per_group=True)
    redirects: str | None = _setting("Streams to write into files only, as torchrun's --redirects.", "--redirects")
    chaos: str | None = _setting(
        "Kill, freeze and drain own groups to try a script: kill=30s,stop=60s,seed=7.", "--chaos"
    )


@dataclass(frozen=True)
class Option:
    """One setting, wherever it is written."""

    name: str
    kind: type
    help: str
    ftrun: str
    """ftrun's option; "": given to the processes by `env`."""
    choices: tuple[str, ...]
    per_group: bool
    """Differs from group to group, machine to machine or run to run: not asked for, but may be written anywhere."""
    launcher: bool
    """It is a field of LaunchSettings."""

    @property
    def env(self) -> str:
        """The environment variable, ACCELERATE_FT_..."""
        return f"{PREFIX}{self.name.upper()}" if self.launcher else variable(self.name)

    @property
    def flag(self) -> str:
        """The flag of `ft-accelerate launch`, --ft_..."""
        return FLAG + self.name

    def read(self, value: object, source: str) -> Any:
        """The value in its type.

        Args:
            value: as given: text of a flag or variable, or what YAML made of it.
            source: where it was given, for the message.

        Raises:
            ConfigError: it cannot work; names `source`, the value and what it must be.
        """
        if not self.launcher:
            return check(self.name, value, source)
        if self.kind is not str:
            return _number(self.kind, value, source)
        if isinstance(value, (bool, float, dict, list)):
            raise ConfigError(f"{source}={value!r} must be a text (in quotes)")
        text = str(value)
        if self.choices and text not in self.choices:
            raise ConfigError(f"{source}={text!r} must be one of {', '.join(self.choices)}")
        if self.name == "chaos":
            _check_chaos(text, source)
        if self.name == "replicas":
            _check_replicas(text, source)
        return text


def _check_replicas(text: str, source: str) -> None:
    """Check it as ftrun does, with the place where it was written in the message."""
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if not found:
        raise ConfigError(f"{source}={text!r} must be a number of replica groups, or N:MAX such as 4:8")
    groups, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= groups <= most <= MAX_REPLICAS:
        raise ConfigError(
            f"{source}={text!r} must be 1 to {MAX_REPLICAS} replica groups, the first number not the larger one"
        )


def _check_chaos(text: str, source: str) -> None:
    """Check it as ftrun does, which names its own option."""
    try:
        ChaosSettings.parse(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--chaos", source, 1)) from None


def _number(kind: type, value: object, source: str) -> Any:
    wanted = "a whole number" if kind is int else "a number of seconds"
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError
        number = kind(str(value))
    except ValueError:
        raise ConfigError(f"{source}={value!r} must be {wanted}") from None
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{source}={value!r} must be {wanted}, 0 or more")
    return number


def _options() -> Iterable[Option]:
    kinds = _kinds(LaunchSettings)
    launchers = {field.name: field for field in dataclasses.fields(LaunchSettings)}

    def launcher(name: str) -> Option:
        data = launchers[name].metadata
        return Option(name, kinds[name], data["help"], data["ftrun"], data["choices"], data["per_group"], launcher=True)

    yield launcher("replicas")
    for name, field in FIELDS.items():
        if name not in NOT_LAUNCHED:
            data = field.metadata
            yield Option(name, KINDS[name], data["help"], FTRUNS.get(name, ""), (), data["per_group"], launcher=False)
    for name in launchers:
        if name != "replicas":
            yield launcher(name)


OPTIONS: Mapping[str, Option] = {option.name: option for option in _options()}
"""Every option of fault tolerance by name, in the order in which they are shown and asked."""


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
        Addresses.parse(read, source)
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
