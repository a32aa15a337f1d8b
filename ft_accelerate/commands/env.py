"""`ft-accelerate env`: what accelerate env prints, and what belongs to fault tolerance.

Threads: the main one.
"""

from __future__ import annotations

import argparse
import os
from importlib import metadata
from typing import TYPE_CHECKING

from ft_accelerate._compat.launch import env_command
from ft_accelerate.options import PREFIX
from ft_accelerate.yaml_config import default_accelerate_file, find, plain
from ft_core.loop.tools import release

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_accelerate.yaml_config import Document

SECRET = ("FT_TOKEN", "FT_ADMIN_TOKEN")


def main(argv: Sequence[str]) -> int:
    """Run `ft-accelerate env`.

    Raises:
        ConfigError: the config file cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="ft-accelerate env", description="Prints versions and settings, to be put into an issue."
    )
    parser.add_argument("--config_file", "--config-file", help="the file to show")
    document = find(parser.parse_args(list(argv)).config_file)
    if document.path:
        with plain(document) as path:
            env_command(argparse.Namespace(config_file=path))
    else:
        env_command(argparse.Namespace(config_file=default_accelerate_file()))
    print("\n".join(lines(document)))
    return 0


def lines(document: Document) -> list[str]:
    """Lines about fault tolerance: versions, the section, the variables (values of secrets left out)."""
    section = [f"\t- {name}: {value}" for name, value in document.section.items()]
    variables = [
        f"\t- {name}: {'(set)' if name in SECRET else text}"
        for name, text in sorted(os.environ.items())
        if name.startswith(("FT_", PREFIX))
    ]
    return [
        f"- `ft-training` version: {release()}",
        f"- `grpcio` version: {metadata.version('grpcio')}",
        f"- Fault tolerance in {document.path or 'no config file'}:",
        *(section or ["\tNot set"]),
        "- Variables of fault tolerance:",
        *(variables or ["\tNot set"]),
    ]
