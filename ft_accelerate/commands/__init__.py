"""`ft-accelerate`: accelerate's command line for fault-tolerant training. One module per sub-command.

How it works. `main` picks the sub-command and imports its module only then. Every mistake of the user's is a
ConfigError, printed in one line; the exit status is 2 then, 1 for what failed later, else the sub-command's own.

Threads: the main one.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError, FaultToleranceError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "config": ("ft_accelerate.commands.config", "asks, and writes a YAML file; also `config default`, `config update`"),
    "launch": ("ft_accelerate.commands.launch", "runs a script in replica groups, and restarts those that fail"),
    "env": ("ft_accelerate.commands.env", "prints what to put into an issue"),
    "test": ("ft_accelerate.commands.test", "tries this machine: trains, kills a replica group, compares the models"),
    "lighthouse": ("ft_core.lighthouse", "runs a lighthouse, for a job of several machines"),
}
"""Name: (module with a `main(argv) -> status`, what it does)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ft-accelerate`. Returns its exit status."""
    from ft_accelerate.options import suggestion

    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from ft_core.loop.tools import release

        print(f"ft-accelerate {release()}")
        return 0
    try:
        if arguments[0] not in COMMANDS:
            raise ConfigError(f"there is no command {arguments[0]}{suggestion(arguments[0], COMMANDS)}")
        command = importlib.import_module(COMMANDS[arguments[0]][0])
        return int(command.main(arguments[1:]))
    except FaultToleranceError as error:
        print(f"ft-accelerate: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def usage() -> str:
    """The help text of `ft-accelerate`."""
    lines = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: ft-accelerate <command> [<arguments>]", "", "commands:", *lines, "",
         "ft-accelerate <command> --help says more. Options of accelerate's commands work as they do there."]
    )  # fmt: skip
