"""What `ft-accelerate launch` decides: one list of options, where each value comes from, and ftrun's command line.

How it works. `OPTIONS` joins the fields of `FaultTolerancePlugin` (what every process is told) and of `LaunchSettings`
(how replica groups are started). Flags, questions of `config`, the YAML section and the variables are generated from
it. `resolve` picks each value: command line > YAML > environment > default. `ftrun_options` says it in ftrun's words,
`exported` gives the variables that ftrun has no option for, and `in_our_words` turns ftrun's complaint about one of its
options back into the option, key or variable that the user wrote.

`num_processes` is what accelerate starts for one model copy: the processes of one replica group.

Pure: values in, values out. Threads: any.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from ft_accelerate import plugin
from ft_core.errors import ConfigError
from ft_core.launch.chaos_schedule import ChaosSettings
from ft_core.launch.gpus import MODES
from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FLAG = "--ft_"
"""In front of an option's name on the command line, as --fsdp_ is for FSDP's."""
NOT_OURS = ("config_file", "replica_id")
"""Fields of the plugin that the launcher sets otherwise: launch has accelerate's --config_file, groups have `name`."""
FTRUNS = {
    "lighthouse": "--lighthouse", "min_replicas": "--min-replicas", "timeout_s": "--timeout",
    "expected_replicas": "--num-replicas", "replica_group": "--replica",
}  # fmt: skip
"""Fields of the plugin that are options of ftrun, which tells the processes."""


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
    """ftrun's option; "": told to the processes by `env`."""
    choices: tuple[str, ...]
    per_group: bool
    """Differs from group to group, machine to machine or run to run: not asked for, but may be written anywhere."""
    launcher: bool
    """Of LaunchSettings."""

    @property
    def env(self) -> str:
        """ACCELERATE_FT_..."""
        return f"{plugin.PREFIX}{self.name.upper()}" if self.launcher else plugin.variable(self.name)

    @property
    def flag(self) -> str:
        """--ft_..."""
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
            return plugin.check(self.name, value, source)
        if self.kind is not str:
            return _number(self.kind, value, source)
        if isinstance(value, (bool, float, dict, list)):
            raise ConfigError(f"{source}={value!r} must be a text (in quotes)")
        text = str(value)
        if self.choices and text not in self.choices:
            raise ConfigError(f"{source}={text!r} must be one of {', '.join(self.choices)}")
        if self.name == "chaos":
            ChaosSettings.parse(text)
        if self.name == "replicas":
            _check_replicas(text, source)
        return text


def _check_replicas(text: str, source: str) -> None:
    """As ftrun reads it; said here with the place where it was written."""
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if not found:
        raise ConfigError(f"{source}={text!r} must be a number of replica groups, or N:MAX such as 4:8")
    groups, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= groups <= most <= MAX_REPLICAS:
        raise ConfigError(
            f"{source}={text!r} must be 1 to {MAX_REPLICAS} replica groups, the first number not the larger one"
        )


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
    hints = get_type_hints(LaunchSettings)
    launchers = {field.name: field for field in dataclasses.fields(LaunchSettings)}

    def launcher(name: str) -> Option:
        data = launchers[name].metadata
        kind = next(kind for kind in hints[name].__args__ if kind is not type(None))
        return Option(name, kind, data["help"], data["ftrun"], data["choices"], data["per_group"], launcher=True)

    yield launcher("replicas")
    for name, field in plugin.FIELDS.items():
        if name not in NOT_OURS:
            data = field.metadata
            yield Option(
                name, plugin.KINDS[name], data["help"], FTRUNS.get(name, ""), (), data["per_group"], launcher=False
            )
    for name in launchers:
        if name != "replicas":
            yield launcher(name)


OPTIONS: Mapping[str, Option] = {option.name: option for option in _options()}
"""Every option of fault tolerance by name, in the order in which they are shown and asked."""


@dataclass(frozen=True)
class Given:
    """A value and where it was written: --ft_replicas, fault_tolerance_config.replicas, ACCELERATE_FT_REPLICAS."""

    value: Any
    source: str


def resolve(
    flags: Mapping[str, str], section: Mapping[str, Any], environ: Mapping[str, str], aliases: Mapping[str, str]
) -> dict[str, Given]:
    """Each option's value: command line > YAML > environment. Options that nobody named are not in the result.

    Args:
        flags: what the command line says, by option name.
        section: the YAML section, checked (`config.load`).
        environ: of this process.
        aliases: of `flags`, those that were given as an option of accelerate's: name -> how it was written.

    Raises:
        ConfigError: a value cannot work; names where it was given.
    """
    found: dict[str, Given] = {}
    rank: dict[str, int] = {}
    for name, option in OPTIONS.items():
        places = (
            (aliases.get(name, option.flag), flags.get(name)),
            (f"{plugin.SECTION}.{name}", section.get(name)),
            (option.env, environ.get(option.env) or None),
        )
        for number, (source, value) in enumerate(places):
            if value is not None:
                found[name], rank[name] = Given(option.read(value, source), source), number
                break
    for name in ("replicas", "replica_offset"):  # several groups here, or one: what was said closer at hand counts
        if "replica_group" in found and name in found and rank[name] != rank["replica_group"]:
            del found[max(name, "replica_group", key=lambda other: rank[other])]
    known = {option.env for option in OPTIONS.values()} | {plugin.variable(name) for name in NOT_OURS}
    for variable in environ:
        if variable.startswith(plugin.PREFIX) and variable not in known:
            raise ConfigError(
                f"environment variable {variable} is not known to ft-accelerate{suggestion(variable, known)}"
            )
    return found


def suggestion(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?', or what there is."""
    import difflib

    names = sorted(known)
    near = difflib.get_close_matches(word, names, 1)
    return f"; did you mean {near[0]}?" if near else f" (known: {', '.join(names)})"


def ftrun_options(given: Mapping[str, Given]) -> list[str]:
    """ftrun's words for what it has options for."""
    return [f"{OPTIONS[name].ftrun}={_text(it.value)}" for name, it in given.items() if OPTIONS[name].ftrun]


def exported(given: Mapping[str, Given], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for the processes: `environ`, our variables replaced by what was resolved for them.

    What ftrun tells them is not in it: it names the group a process is in, and a second word could only differ.
    """
    rest = {name: text for name, text in environ.items() if not name.startswith(plugin.PREFIX)}
    ours = {OPTIONS[name].env: _text(it.value) for name, it in given.items() if not OPTIONS[name].ftrun}
    return {plugin.variable("enabled"): "true", **rest, **ours}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_our_words(message: str, given: Mapping[str, Given]) -> str:
    """A ConfigError of ftrun's, with its options replaced by what the user wrote or can write."""
    words = {option.ftrun: option.flag for option in OPTIONS.values() if option.ftrun}
    words.update({OPTIONS[name].ftrun: it.source for name, it in given.items() if OPTIONS[name].ftrun})
    words["--nproc-per-replica"] = "num_processes (of one replica group)"
    return re.sub(r"--[a-z-]+", lambda found: words.get(found[0], found[0]), message)
