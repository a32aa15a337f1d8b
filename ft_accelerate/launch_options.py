"""The decisions of `ft-accelerate launch`: where each option's value comes from, and ftrun's command line.

How it works. `resolve` picks the value of each of `options.OPTIONS`: command line > YAML > environment > default.
`ftrun_options` translates what ftrun has options for, `exported` gives the variables for the rest, and `in_our_words`
replaces ftrun's options in its error messages by the option, key or variable that the user wrote.

`num_processes` is what accelerate starts for one model copy: the processes of one replica group.

Pure: values in, values out. Threads: any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ft_accelerate.options import NOT_LAUNCHED, OPTIONS, PREFIX, SECTION, suggestion, variable
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        section: the YAML section, checked (`yaml_config.load`).
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
            (f"{SECTION}.{name}", section.get(name)),
            (option.env, environ.get(option.env) or None),
        )
        for number, (source, value) in enumerate(places):
            if value is not None:
                found[name], rank[name] = Given(option.read(value, source), source), number
                break
    for name in ("replicas", "replica_offset"):  # several groups here, or one: what was said closer at hand counts
        if "replica_group" in found and name in found and rank[name] != rank["replica_group"]:
            del found[max(name, "replica_group", key=lambda other: rank[other])]
    known = {option.env for option in OPTIONS.values()} | {variable(name) for name in NOT_LAUNCHED}
    for key in environ:
        if key.startswith(PREFIX) and key not in known:
            raise ConfigError(f"environment variable {key} is not known to ft-accelerate{suggestion(key, known)}")
    return found


def ftrun_options(given: Mapping[str, Given]) -> list[str]:
    """The options of ftrun for what was given and ftrun has options for."""
    return [f"{OPTIONS[name].ftrun}={_text(it.value)}" for name, it in given.items() if OPTIONS[name].ftrun]


def exported(given: Mapping[str, Given], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for the processes: `environ`, our variables replaced by what was resolved for them.

    What ftrun sets itself is left out: a second value of the group's number could only differ.
    """
    rest = {name: text for name, text in environ.items() if not name.startswith(PREFIX)}
    ours = {OPTIONS[name].env: _text(it.value) for name, it in given.items() if not OPTIONS[name].ftrun}
    return {variable("enabled"): "true", **rest, **ours}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_our_words(message: str, given: Mapping[str, Given]) -> str:
    """The message of a ConfigError of ftrun, with its options replaced by what the user wrote or can write."""
    words = {option.ftrun: option.flag for option in OPTIONS.values() if option.ftrun}
    words.update({OPTIONS[name].ftrun: it.source for name, it in given.items() if OPTIONS[name].ftrun})
    words["--nproc-per-replica"] = "num_processes (of one replica group)"
    return re.sub(r"--[a-z-]+", lambda found: words.get(found[0], found[0]), message)
