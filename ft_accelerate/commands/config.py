"""`ft-accelerate config`: accelerate's questions, then those about fault tolerance; `config default`, `config update`.

How it works. accelerate's own dialogue makes its part of the file. Ours asks for the replica groups, and for the other
options (`options.OPTIONS`, those that are the same in every run) only if wanted; an empty answer leaves a setting to
its default, which is not written. `default` writes a file without asking, `update` writes an existing one as the
installed versions would.

Threads: the main one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import TYPE_CHECKING, Any

from accelerate.utils import write_basic_config

from ft_accelerate._compat.launch import get_user_input, load_config_from_file
from ft_accelerate.options import NO, OPTIONS, YES
from ft_accelerate.yaml_config import Document, default_file, load, normalised, save
from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ft_accelerate.options import Option

REPLICAS = "2"
"""Where there are no devices to divide."""
PRECISIONS = ("no", "fp16", "bf16", "fp8")


def main(argv: Sequence[str]) -> int:
    """Run `ft-accelerate config`.

    Raises:
        ConfigError: the file or an argument cannot work.
    """
    args = _parser().parse_args(list(argv))
    path = args.config_file or default_file()
    act: Callable[[str, argparse.Namespace], str] = {"default": _default, "update": _update}.get(args.act, _ask_all)
    print(act(path, args))
    return 0


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="ft-accelerate config", description="Asks about this machine and the training, and writes a YAML file."
    )
    out.add_argument(
        "act", nargs="?", choices=("default", "update"),
        help="default: write a file without asking; update: write an existing one as this version would",
    )  # fmt: skip
    out.add_argument("--config_file", "--config-file", help=f"the file (default {default_file()})")
    out.add_argument(
        "--mixed_precision", "--mixed-precision", choices=PRECISIONS, default="no", help="for `config default`"
    )
    return out


def _default(path: str, args: argparse.Namespace) -> str:
    if os.path.exists(path):
        raise ConfigError(
            f"config file {path} exists and is not overwritten: name another one, or use `ft-accelerate config update`"
        )
    with tempfile.TemporaryDirectory(prefix="ft_accelerate.") as folder:
        basic = os.path.join(folder, "basic.json")
        write_basic_config(args.mixed_precision, basic)
        rest = dict(load_config_from_file(basic).to_dict())
    devices = rest["num_processes"] if not rest["use_cpu"] else 1
    # One device per group: losing one costs as little as possible.
    rest.update(num_processes=1, distributed_type="NO")
    save(Document(path, rest, {"replicas": str(devices) if devices > 1 else REPLICAS}))
    return f"ft-accelerate configuration saved at {path}"


def _update(path: str, args: argparse.Namespace) -> str:
    del args
    if not os.path.isfile(path):
        raise ConfigError(f"config file {path} does not exist: write it with `ft-accelerate config`")
    document = load(path)
    save(Document(path, normalised(document), document.section))
    return f"Successfully updated the configuration file at {path}."


# ---------------------------------------------------------------- questions


def _ask_all(path: str, args: argparse.Namespace) -> str:
    del args
    rest = dict(get_user_input().to_dict())
    if rest["compute_environment"] != "LOCAL_MACHINE":
        raise ConfigError("replica groups are started on this machine only: choose `This machine`")
    section = questions()
    save(Document(path, rest, section))
    return f"ft-accelerate configuration saved at {path}"


def questions(read: Callable[[str], str] = input) -> dict[str, Any]:
    """Ask about fault tolerance. Returns the section; what was left at its default is not in it.

    Args:
        read: shows a prompt, returns the answer.
    """
    section: dict[str, Any] = {}
    section["replicas"] = _ask(
        OPTIONS["replicas"], f"How many replica groups should run on this machine? [{REPLICAS}]: ", read, REPLICAS
    )
    if not _yes("Do you wish to change other settings of fault tolerance? [yes/NO]: ", read):
        return section
    for name, option in OPTIONS.items():
        if name == "replicas" or option.per_group:
            continue
        choices = f" ({', '.join(option.choices)})" if option.choices else ""
        value = _ask(option, f"{option.help.rstrip('.')}{choices} [default]: ", read, None)
        if value is not None:
            section[name] = value
    return section


def _ask(option: Option, prompt: str, read: Callable[[str], str], default: str | None) -> Any:
    while True:  # until the person has answered
        answer = read(prompt).strip()
        try:
            return option.read(answer, option.name) if answer else default
        except ConfigError as error:
            print(error)


def _yes(prompt: str, read: Callable[[str], str]) -> bool:
    while True:
        answer = read(prompt).strip().lower()
        if not answer or answer in YES + NO:
            return answer in YES
        print("Please enter yes or no.")
