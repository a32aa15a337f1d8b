"""`ft-lighthouse`: the lighthouse's command line.

How it works. `main` starts a `LighthouseServer` and waits for SIGTERM or SIGINT. Log lines leave through a bounded
queue, so that a reader of stderr that stands still never holds up the loop.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import logging.handlers
import os
import queue
import re
import signal
import sys
from typing import TYPE_CHECKING

from ft_core.access import ADMIN_TOKEN_FILE, own_admin_token
from ft_core.control.lighthouse.dashboards import AUTO, OFF, PORT
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError
from ft_core.rpc.channel import release
from ft_core.settings import MAX_REPLICAS

if TYPE_CHECKING:
    from collections.abc import Sequence

STOPS = (signal.SIGTERM, signal.SIGINT)
"""What ends it."""


class _DroppingHandler(logging.handlers.QueueHandler):
    """Never blocks the loop: a reader of stderr that stands still costs log lines, not leases."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


def _log_to_stderr() -> logging.handlers.QueueListener:
    lines: queue.Queue[logging.LogRecord] = queue.Queue(10_000)
    out = logging.StreamHandler()
    out.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d lighthouse: %(message)s", "%H:%M:%S"))
    logging.getLogger("ft_core").setLevel(logging.INFO)
    logging.getLogger().addHandler(_DroppingHandler(lines))
    listener = logging.handlers.QueueListener(lines, out)
    listener.start()
    return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ft-lighthouse", description="Coordinator of fault-tolerant training: knows who is alive, decides quorums."
    )

    def option(name: str, **more: object) -> None:
        spellings = [f"--{name}"] + ([f"--{name.replace('-', '_')}"] if "-" in name else [])
        parser.add_argument(*spellings, dest=name.replace("-", "_"), **more)  # type: ignore[arg-type]

    option(
        "bind",
        default="localhost:29510",
        help="host:port to listen on (default %(default)s, this machine only; [::]:29510: all addresses; port 0: any "
        "free one)",
    )
    option(
        "insecure", action="store_true",
        help="listen for other machines without FT_TOKEN: trust the whole network (FT_INSECURE)",
    )  # fmt: skip
    option(
        ADMIN_TOKEN_FILE.removeprefix("--"), metavar="FILE",
        help="drain and kill are taken only with the token in this file (FT_ADMIN_TOKEN, else FT_TOKEN is enough)",
    )  # fmt: skip
    option("min-replicas", type=int, help="smallest quorum (default: FT_MIN_REPLICAS, else 1)")
    option("join-timeout-ms", type=int, default=100, help="wait for connected replicas that have not asked yet")
    option("heartbeat-timeout-ms", type=int, default=5000, help="clients without a lease live this long after a call")
    option("quorum-tick-ms", type=int, default=100, help="accepted and unused: nothing polls")
    option("liveness-ms", type=int, help="silence after which a replica is presumed frozen (FT_LIVENESS_S, else 1000)")
    option("grace-ms", type=int, default=100, help="time a closed connection has to come back")
    option(
        "boot-window-ms",
        type=int,
        help="time running groups have to return after a restart of this server (500; none on port 0)",
    )
    option(
        "http",
        metavar="HOST:PORT|off",
        default=AUTO,
        help=f"where the dashboard listens, or off (default: localhost:{PORT}, or a free port if that one is in use)",
    )
    option(
        "peer", metavar="HOST:PORT", default="",
        help="the other lighthouse of a pair, which is started with this one's address: one serves, and the other "
        "takes its place when it is gone; clients get both: --lighthouse HOST0:PORT,HOST1:PORT",
    )  # fmt: skip
    option("events", metavar="DIR", help="write what happens there, as JSON lines (FT_EVENTS, else nowhere)")
    option("metrics", metavar="HOST:PORT", help="serve metrics for Prometheus there, at /metrics (default: nowhere)")
    parser.add_argument("--version", action="version", version=f"ft-lighthouse {release()}")
    return parser


def _min_replicas(given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get("FT_MIN_REPLICAS", "") or "1"
    if not text.isdigit() or not 1 <= int(text) <= MAX_REPLICAS:
        raise ConfigError(f"FT_MIN_REPLICAS={text!r} must be a whole number from 1 to {MAX_REPLICAS}")
    return int(text)


def _as_options(text: str) -> str:
    """An error of LighthouseServer in the words of the command line: join_timeout_ms=-5 was --join-timeout-ms -5."""
    options = "bind|http|min_replicas|metrics|peer|(?:join_timeout|heartbeat_timeout|liveness|grace|boot_window)_ms"
    return re.sub(rf"\b({options})=", lambda found: f"--{found[1].replace('_', '-')} ", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a lighthouse until SIGTERM or SIGINT. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    # Blocked, in all threads that are made from here on, until they are waited for. A handler would not do: Python runs
    # it in the main thread, which does not look again between its wait for the interpreter lock and its wait in C.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    listener, server = _log_to_stderr(), None
    try:
        server = LighthouseServer(
            arguments.bind,
            _min_replicas(arguments.min_replicas),
            arguments.join_timeout_ms,
            arguments.quorum_tick_ms,
            arguments.heartbeat_timeout_ms,
            liveness_ms=arguments.liveness_ms,
            grace_ms=arguments.grace_ms,
            boot_window_ms=arguments.boot_window_ms,
            admin_token=own_admin_token(os.environ, arguments.admin_token_file or ""),
            insecure=arguments.insecure,
            events=arguments.events,
            metrics=arguments.metrics,
            http="" if arguments.http == OFF else arguments.http,
            peer=arguments.peer,
        )
    except ConfigError as error:
        print(f"ft-lighthouse: {_as_options(str(error))}", file=sys.stderr)
        return 2
    finally:
        if server is None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            listener.stop()
    print(f"ft-lighthouse listens on {server.address()}", flush=True)
    if server.http_line():
        print(server.http_line(), flush=True)
    signal.sigwait(STOPS)
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)  # launchers repeat SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    server.shutdown()
    listener.stop()
    return 0
