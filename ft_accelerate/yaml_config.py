"""The configuration file of `ft-accelerate`: accelerate's own YAML (or JSON), and a `fault_tolerance_config` section.

How it works. accelerate refuses top-level keys that it does not know, so `load` takes the section out and checks it,
and `plain` writes what is left to a temporary file for accelerate's own reader. `save` puts both together.

Invariant: what `load` returns has only known keys, with values of their types. Threads: any.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import yaml

from ft_accelerate._compat.launch import ClusterConfig, cache_dir, default_config_file, load_config_from_file
from ft_accelerate.options import OPTIONS, SECTION, suggestion
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSION_KEY = "config_version"
VERSION = 1
"""The version of the section. It grows when a key changes its meaning; a file without one is of version 1."""

NOTHING = (None, "", "~", "null")
"""Values of a key that says nothing."""
TEXTS = ("distributed_type", "mixed_precision")
WANTED = {int: "a whole number", dict: "followed by indented lines"}
"""Types of accelerate's keys that its own reader takes as they come, to fail later without a name."""


def default_file() -> str:
    """Where `ft-accelerate config` writes, and `launch` looks, if nobody names a file.

    Not accelerate's own default file: plain `accelerate launch` refuses one that has our section.
    """
    return os.path.join(cache_dir, "default_ft_config.yaml")


def default_accelerate_file() -> str | None:
    """Accelerate's own default file, which it reads if nobody names one; None if there is none."""
    return default_config_file if os.path.isfile(default_config_file) else None


@dataclass(frozen=True)
class Document:
    """A configuration file that was read."""

    path: str
    """"": there is none."""
    rest: Mapping[str, Any]
    """Settings of accelerate."""
    section: Mapping[str, Any]
    """Settings of fault tolerance, checked; without the version."""


def find(given: str | None) -> Document:
    """The file that a command line names, else our default one if it exists, else none.

    Raises:
        ConfigError: as `load`.
    """
    path = given or (default_file() if os.path.isfile(default_file()) else "")
    return load(path) if path else Document("", {}, {})


def load(path: str) -> Document:
    """Read and check a file.

    Raises:
        ConfigError: it cannot be read, has an unknown key, a value that cannot work, or is of a newer version.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
        # As texts: in YAML `replicas: 2:8` is the number 128.
        texts = content if path.endswith(".json") else yaml.load(text, Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config file {path} has no settings: write it with `ft-accelerate config`")
    checked = check(texts.get(SECTION) or {}, path)
    content.pop(SECTION, None)
    _check_rest(content, path)
    return Document(path, content, checked)


def check(section: Any, path: str) -> dict[str, Any]:
    """The section's values in their types.

    Raises:
        ConfigError: see `load`.
    """
    if not isinstance(section, dict):
        dashes = "; leave out the dashes" if isinstance(section, list) else ""
        raise ConfigError(
            f"{SECTION} in {path} must be followed by indented lines such as `replicas: 2`{dashes}. It is {section!r}"
        )
    version = section.get(VERSION_KEY, VERSION)
    if not str(version).isdecimal() or int(version) < 1:
        raise ConfigError(f"{SECTION}.{VERSION_KEY}={version!r} in {path} must be a whole number, {VERSION} at most")
    if int(version) > VERSION:
        raise ConfigError(
            f"config file {path} was written by a newer ft-accelerate ({VERSION_KEY} {version}, this one reads up to "
            f"{VERSION}): pip install --upgrade ft-training, or write it anew with `ft-accelerate config`"
        )
    values = {}
    for name, value in section.items():
        if name == VERSION_KEY:
            continue
        if name not in OPTIONS:
            raise ConfigError(f"{SECTION} in {path} has an unknown key {name}{suggestion(str(name), OPTIONS)}")
        if value not in NOTHING:
            values[name] = OPTIONS[name].read(value, f"{SECTION}.{name} in {path}")
    return values


def _check_rest(rest: dict[str, Any], path: str) -> None:
    """Accelerate's reader would name the temporary file. Whole numbers in quotes become numbers."""
    if rest.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError(
            f"compute_environment={rest['compute_environment']} in {path}: replica groups are started on this machine "
            "only; write LOCAL_MACHINE, or use plain `accelerate launch`"
        )
    if "distributed_type" not in rest:
        raise ConfigError(f"config file {path} has no distributed_type: write 'NO' for groups of one process")
    for name in TEXTS:
        if rest.get(name) is False:
            raise ConfigError(f"{name} in {path}: YAML reads a bare no as false; write it in quotes")
    known = {*ClusterConfig.__dataclass_fields__, "fp16", "dynamo_backend", SECTION}
    for name in rest:
        if name not in known:
            raise ConfigError(f"config file {path} has an unknown key {name}{suggestion(str(name), known)}")
    for name, hint in get_type_hints(ClusterConfig).items():
        kind = next((kind for kind in WANTED if kind in (hint, *get_args(hint))), None)
        if kind is None or rest.get(name) in NOTHING:
            continue
        if kind is int and str(rest[name]).isdecimal():
            rest[name] = int(rest[name])
        if not isinstance(rest[name], kind) or isinstance(rest[name], bool):
            raise ConfigError(f"{name}={rest[name]!r} in {path} must be {WANTED[kind]}")


@contextlib.contextmanager
def plain(document: Document) -> Iterator[str]:
    """A temporary file with what is accelerate's, for accelerate to read."""
    with tempfile.TemporaryDirectory(prefix="ft_accelerate.") as folder:
        path = os.path.join(folder, "accelerate.yaml")
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(dict(document.rest), file)
        yield path


def normalised(document: Document) -> dict[str, Any]:
    """Accelerate's part as its installed version would write it.

    Raises:
        ConfigError: accelerate cannot read it.
    """
    with plain(document) as path:
        try:
            return dict(load_config_from_file(path).to_dict())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"config file {document.path}: {str(error).replace(path, document.path)}") from error


def save(document: Document) -> None:
    """Write the file: accelerate's keys in their order, our section last.

    Raises:
        ConfigError: it cannot be written.
    """
    section = {VERSION_KEY: VERSION, **{name: document.section[name] for name in OPTIONS if name in document.section}}
    content = {**{name: document.rest[name] for name in sorted(document.rest)}, SECTION: section}
    try:
        os.makedirs(os.path.dirname(os.path.abspath(document.path)), exist_ok=True)
        with open(document.path, "w", encoding="utf-8") as file:
            if document.path.endswith(".json"):
                file.write(json.dumps(content, indent=2) + "\n")
            else:
                yaml.safe_dump(content, file, sort_keys=False)
    except OSError as error:
        raise ConfigError(f"config file {document.path} cannot be written: {error.strerror}") from error
