"""`ft-report`: the command line of the report.

Exit status: 0, also if some of the files could not be used; 2 if there is nothing to report on.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from ft_core.report.account import account
from ft_core.report.page import render as page
from ft_core.report.picture import draw
from ft_core.report.reader import read
from ft_core.report.text import escaped, fitting
from ft_core.report.text import render as text
from ft_core.rpc.channel import release

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ft_core.report.account import Account

PNG, HTML = "timeline.png", "timeline.html"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ft-report",
        description="Where every second of a training job went, out of its event files.",
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folders of event files (ftrun --events, FT_EVENTS)")
    parser.add_argument("--out", metavar="DIR", help=f"where {PNG} and {HTML} go (default: the first folder)")
    parser.add_argument("--no-pictures", action="store_true", help="only the text")
    parser.add_argument("--version", action="version", version=f"ft-report {release()}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        found = read(arguments.folders)
    except OSError as error:
        print(f"ft-report: cannot read {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    if not found.logs:
        for problem in found.problems:
            print(f"ft-report: {problem}", file=sys.stderr)
        where = ", ".join(arguments.folders)
        print(f"ft-report: no events in {where}: is it the folder that ftrun --events or FT_EVENTS named?",
              file=sys.stderr)  # fmt: skip
        return 2
    result = account(found)
    _print(text(result, found.problems))
    if not arguments.no_pictures:
        first = arguments.folders[0]
        folder = arguments.out or (first if os.path.isdir(first) else os.path.dirname(first) or ".")
        _pictures(result, found.problems, folder)
    return 0


def _print(lines: str) -> None:
    """To stdout, as long as somebody reads it: `ft-report DIR | head` draws its pictures, too."""
    try:
        sys.stdout.write(fitting(escaped(lines), sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _pictures(result: Account, problems: Sequence[str], folder: str) -> None:
    """Draw what can be drawn; say where it is, or why it is not."""
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, HTML), "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(page(result, problems))
        why = draw(result, os.path.join(folder, PNG))
    except OSError as error:
        print(f"ft-report: no pictures in {folder} ({error.strerror}): name another folder with --out", file=sys.stderr)
        return
    drawn = [os.path.join(folder, name) for name in ((HTML,) if why else (PNG, HTML))]
    _print(f"\ntimeline: {', '.join(drawn)}\n")
    if why:
        print(f"ft-report: {why}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
