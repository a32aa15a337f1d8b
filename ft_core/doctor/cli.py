"""`ft-doctor`: the command line.

Exit status: 0 if all is well, 1 with warnings, 2 with problems, and for wrong usage; 130 if it was ended (Ctrl-C,
SIGTERM) before it was done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from typing import TYPE_CHECKING

from ft_core.doctor.aftermath import explain
from ft_core.doctor.findings import by_level, ok, status
from ft_core.doctor.host import collect
from ft_core.doctor.host_checks import check
from ft_core.doctor.launchers import place, superfluous
from ft_core.doctor.text import WIDTH, render
from ft_core.doctor.together import Options, together
from ft_core.errors import ConfigError
from ft_core.report.account import account
from ft_core.report.reader import read
from ft_core.report.text import fitting
from ft_core.rpc.channel import release

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ft_core.doctor.findings import Finding

USAGE = 2
INTERRUPTED = 130
"""As shells say it of a program that Ctrl-C has ended."""
WAIT_MAX_S = 3600.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ft-doctor",
        allow_abbrev=False,
        description="Says what is wrong: with this host, with the hosts of a job before it starts, and with a job that "
        "has failed.",
    )
    parser.add_argument("--events", nargs="+", metavar="DIR", help="after a failure: the folders of the job's events")
    meet = parser.add_argument_group("several hosts, before a job; run it on each, under the job's launcher or by hand")
    meet.add_argument(
        "--meet",
        metavar="HOST[:PORT]",
        help="where they meet: the first host, on which ft-doctor runs, too "
        "(default: what ftrun, torchrun or srun say)",
    )
    meet.add_argument("--hosts", type=int, metavar="N", help="how many ft-doctors come there")
    meet.add_argument("--wait", type=float, default=60.0, metavar="S", help="how long they may take (default 60)")
    meet.add_argument("--no-bandwidth", action="store_true", help="do not measure it")
    meet.add_argument("--alone", action="store_true", help="look at this host only, whatever the launcher says")
    parser.add_argument("--storage", default="", metavar="PATH", help="a folder that all hosts share, for checkpoints")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.add_argument("--version", action="version", version=f"ft-doctor {release()}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        with _ended_in_order():
            findings, printed_by = _findings(arguments)
    except ConfigError as error:
        print(f"ft-doctor: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("ft-doctor: ended before it was done; nothing is known", file=sys.stderr)
        return INTERRUPTED
    if printed_by:
        print(f"ft-doctor: what was found is printed once for all hosts, on {printed_by}", file=sys.stderr)
    else:
        _print(findings, as_json=arguments.json)
    return status(findings)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Inside, SIGTERM is as Ctrl-C: what was written to the storage, or announced at the lighthouse, is withdrawn."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _findings(arguments: argparse.Namespace) -> tuple[list[Finding], str]:
    """What was asked for, and which other host prints it. Raises ConfigError for wrong usage."""
    if arguments.events:
        return after(arguments.events), ""
    if not 0 < arguments.wait <= WAIT_MAX_S:
        raise ConfigError(f"--wait {arguments.wait:g} must be more than 0 and at most {WAIT_MAX_S:g} seconds")
    if arguments.alone and (arguments.meet or arguments.hosts):
        raise ConfigError("--alone and --meet exclude each other")
    why = superfluous(os.environ)
    if why:
        return [ok("hosts", "-", f"nothing to do: {why}")], ""
    where = None if arguments.alone else place(arguments.meet, arguments.hosts, os.environ)
    if where is None:
        return check(collect(os.environ, arguments.storage)), ""
    at = f"by the lighthouse {where.host}" if where.at_lighthouse else f"at {where.host}:{where.port}"
    print(f"ft-doctor: meeting {where.hosts} hosts {at} (by {where.by})", file=sys.stderr)
    options = Options(arguments.wait, arguments.storage, not arguments.no_bandwidth)
    result = together(where, options, os.environ)
    by_hand = arguments.meet is not None  # each at a terminal of its own
    return result.findings, "" if by_hand else result.first


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
        sys.stdout.write(fitting(text, sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
