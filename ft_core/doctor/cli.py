"""`ft-doctor`: the command line.

Exit status: 0 if all is well, 1 with warnings, 2 with problems, and for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING

from ft_core.doctor.aftermath import explain
from ft_core.doctor.findings import by_level, status
from ft_core.doctor.text import WIDTH, render
from ft_core.errors import ConfigError
from ft_core.report.account import account
from ft_core.report.reader import read
from ft_core.rpc.channel import release

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.doctor.findings import Finding

USAGE = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ft-doctor",
        allow_abbrev=False,
        description="Says what is wrong: with this host, with the hosts of a job before it starts, and with a job that "
        "has failed.",
    )
    parser.add_argument("--events", nargs="+", metavar="DIR", help="after a failure: the folders of the job's events")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.add_argument("--version", action="version", version=f"ft-doctor {release()}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        findings = after(arguments.events)
    except ConfigError as error:
        print(f"ft-doctor: {error}", file=sys.stderr)
        return USAGE
    _print(findings, as_json=arguments.json)
    return status(findings)


def after(folders: Sequence[str]) -> list[Finding]:
    """Of a job that has run. Raises ConfigError if there is nothing to read."""
    try:
        found = read(folders)
    except OSError as error:
        raise ConfigError(f"--events {error.filename}: cannot be read ({error.strerror})") from None
    if not found.logs:
        why = "".join(f"; {problem}" for problem in found.problems)
        raise ConfigError(
            f"--events {' '.join(folders)}: there are no events{why}. Is it the folder that --events or FT_EVENTS "
            "named in that job? ftrun names it in its first line"
        )
    return explain(found, account(found))


def _print(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        out = {"status": status(findings), "findings": [finding.as_json() for finding in by_level(findings)]}
        text = json.dumps(out, indent=1) + "\n"
    else:
        text = render(findings, shutil.get_terminal_size((WIDTH, 24)).columns)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
