"""The command `ftrun`."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError, FaultToleranceError
from ft_core.launch.control_socket import base_folder, order_resize
from ft_core.launch.options import parse
from ft_core.launch.processes.keeper import Keeper

if TYPE_CHECKING:
    from collections.abc import Sequence


RESIZE_USAGE = "usage: ftrun resize N [--run-id ID]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ftrun. Returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        if arguments[:1] == ["resize"]:
            return _resize(arguments[1:])
        return _run(arguments)
    except FaultToleranceError as error:
        print(f"ftrun: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:  # before or after the part in which the supervisor takes the signal
        return 130


def _open_standard_streams() -> None:
    """Where one of them is closed, the next socket of ours would take its number, and with it a worker's output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for good


def _run(arguments: list[str]) -> int:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            spec = parse(arguments, os.environ)
        finally:
            for warning in told:  # a name of FT_* that nobody knows may be why it cannot work
                print(f"ftrun: {warning.message}", file=sys.stderr)
    try:
        folder = tempfile.mkdtemp(prefix=f"{spec.run_id}.", dir=base_folder())
    except OSError as error:
        raise ConfigError(f"no directory for ftrun's sockets ({error}): set TMPDIR to a writable one") from None
    try:
        keeper = Keeper(folder)  # first: from here on nothing can be left behind
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        # torch takes a second to import: bad input is answered before that.
        from ft_core.launch.output.status_screen import Screen
        from ft_core.launch.supervisor import Supervisor

        if "LOGLEVEL" not in os.environ:  # what torch's agent says at WARNING, ftrun says in its own words
            for name in list(logging.root.manager.loggerDict):
                if name.startswith("torch.distributed.elastic"):
                    logging.getLogger(name).setLevel(logging.CRITICAL)
        return Supervisor(spec, keeper, folder, Screen()).run()
    finally:
        keeper.close()


def _resize(arguments: list[str]) -> int:
    wanted, run_id = "", ""
    rest = list(arguments)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        if word in ("-h", "--help"):
            print(f"{RESIZE_USAGE}: tells the ftrun that runs here to run N replica groups from now on")
            return 0
        if word in ("--run-id", "--run_id", "--rdzv-id", "--rdzv_id"):
            run_id = value if equals else rest.pop(0) if rest else ""
            if not run_id:
                raise ConfigError(f"ftrun resize: {word} needs a value; {RESIZE_USAGE}")
        elif not wanted and re.fullmatch("[0-9]{1,9}", word) and not equals:
            wanted = word
        else:
            raise ConfigError(f"ftrun resize: {word} is not understood; {RESIZE_USAGE}")
    if not wanted:
        raise ConfigError(f"ftrun resize: how many groups? {RESIZE_USAGE}")
    answer = order_resize(int(wanted), run_id)
    ok = answer.startswith("ok")
    print(f"ftrun: {answer}", file=sys.stdout if ok else sys.stderr)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
