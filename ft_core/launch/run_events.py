"""`RunEvents`: what ftrun does and sees, as events for the job's log; and where the events of a run go.

How it works. The supervisor calls one method for each thing that happens. `folder_for` names the folder: what the user
said, or one of the run. ftrun keeps the events of the last KEPT_RUNS runs that named no folder, and of all that are
still alive.

Invariants: an unwritable folder is reported once, before anything is started, and the run goes on without events.
Threads: any; the supervisor's main thread in nearly all cases.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from typing import TYPE_CHECKING

from ft_core.access import Tokens
from ft_core.certificates import Tls
from ft_core.events.event_log import open_events
from ft_core.events.schema import FTRUN
from ft_core.metrics.admission import Admission
from ft_core.metrics.exposition import Page, missing
from ft_core.metrics.metrics import Metrics, beside
from ft_core.metrics.server import MetricsServer
from ft_core.rpc.channel import release

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ft_core.control.lighthouse.server import LighthouseServer
    from ft_core.launch.spec import JobSpec
    from ft_core.launch.worker_run import Failure

KEPT_RUNS = 20
"""Runs of one user on this machine whose events are kept where no folder was named."""
QUIET_S = 600.0
"""A run that has written nothing for so long is over: one that is alive writes every second."""
OFF = "off"
"""What switches events off on the command line."""


def folder_for(given: str | None, log_dir: str, run_id: str, environ: Mapping[str, str]) -> str:
    """Where the events of a run go; '': nowhere.

    Args:
        given: --events; None: FT_EVENTS, else a folder of the run.
        log_dir: of --log-dir, or ''.
        run_id: of this run.
        environ: the environment.
    """
    named = environ.get("FT_EVENTS", "") if given is None else given
    if named == OFF:
        return ""
    if named:
        return os.path.abspath(named)
    if log_dir:
        return os.path.join(log_dir, run_id, "events")
    return os.path.join(tempfile.gettempdir(), f"ftrun-events-{os.getuid()}", run_id)


def prepare(folder: str) -> str:
    """Make the folder of a run, and forget old runs beside it. Returns why that cannot be; '': it can."""
    above = os.path.dirname(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"events cannot be written to {folder} ({error.strerror}): the run goes on without them"
    if os.path.basename(above) == f"ftrun-events-{os.getuid()}":
        _forget_old_runs(above, folder)
    return ""


def _forget_old_runs(above: str, mine: str) -> None:
    """Remove all but the newest; never one that still writes, however many have begun since it did."""
    found = []
    with contextlib.suppress(OSError), os.scandir(above) as runs:
        for run in runs:
            with contextlib.suppress(OSError):  # another run has removed it
                if run.is_dir():
                    found.append((_last_written(run), run.path))
    for last_written, path in sorted(found)[:-KEPT_RUNS]:
        if path != mine and time.time() - last_written > QUIET_S:
            shutil.rmtree(path, ignore_errors=True)


def _last_written(run: os.DirEntry[str]) -> float:
    """When the newest file of a run was written; of the folder, where there is none. Raises OSError."""
    with os.scandir(run.path) as files:
        return max((file.stat().st_mtime for file in files), default=run.stat().st_mtime)


class RunEvents:
    """The log of one run of ftrun.

    Args:
        spec: of the run.
        say: shows the user a line.
    """

    def __init__(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say = spec, say
        self.folder = ""
        """Where all events of the run go; '': nowhere."""
        self.metrics = ""
        """HOST:PORT of ftrun's metrics; '': none are served."""
        self._log = open_events("", FTRUN, "")
        self._page: Page | None = None

    def __repr__(self) -> str:
        return f"RunEvents({self.folder or 'off'})"

    def start(self) -> None:
        """Open the log, and serve metrics. Raises ConfigError: their port cannot be bound."""
        spec = self._spec
        metrics = self._serve() if spec.metrics else None
        if spec.events and (why := prepare(spec.events)):
            self._say(why)
        elif spec.events:
            self.folder = spec.events
            first, last = spec.first, spec.first + spec.groups - 1
            source = f"ftrun-{spec.name}-{first}" + (f"-{last}" if last > first else "")
            self._log = open_events(self.folder, FTRUN, source, release())
        self._log = beside(self._log, metrics)

    def _serve(self) -> Metrics | None:
        """Serve metrics. None: what that takes is not installed."""
        spec = self._spec
        if why := missing():
            self._say(why)
            return None
        metrics = Metrics(FTRUN)
        self._page = Page([metrics])
        tokens = Tokens("" if spec.made_token else spec.token, spec.admin_token)
        admission = Admission(tokens, Tls.from_env(os.environ), spec.insecure)
        server = MetricsServer(self._page, spec.metrics, f"ftrun-{spec.name}", spec.metrics_setting, admission)
        server.start(must_bind=True)
        metrics.ends = server.close
        self.metrics = spec.metrics
        ports = "at free ports" if spec.metrics.endswith(":0") else f"at {spec.metrics_of(0)} + N"
        self._say(f"metrics at {server.url}, those of group N {ports}")
        return metrics

    def embedded(self, server: LighthouseServer) -> str:
        """A lighthouse runs here: its metrics stand on the same page. Returns its address."""
        if self._page is not None and server.metrics is not None:
            self._page.add(server.metrics)
        return server.address()

    def close(self, status: int | None, restarts: int) -> None:
        """End it. None: this run ends with an error."""
        self._log.emit("run_ended", status=1 if status is None else status, restarts=restarts)
        self._log.close()

    def run_started(self, lighthouse: str, total: int) -> None:
        """The lighthouse answers; groups are started now."""
        spec = self._spec
        self._log.emit(
            "run_started", run_id=spec.run_id, script=str(spec.script), total=total, ranks=spec.nproc,
            groups=[spec.group_name(number) for number in range(spec.first, spec.first + spec.groups)],
            lighthouse=lighthouse, chaos=str(spec.chaos or ""),
        )  # fmt: skip

    def started(self, group: str, pids: Mapping[int, int], restarts: int, *, warm: bool) -> None:
        """The processes of a group were started."""
        self._log.emit("started", group=group, pids=list(pids.values()), warm=warm, restarts=restarts)

    def failed(self, failure: Failure) -> None:
        """A group has failed."""
        self._log.emit(
            "failed", group=failure.name, rank=failure.local_rank, pid=failure.pid, code=failure.code,
            error=failure.error, lived_s=failure.lived_s, sentence=str(failure), excuse=failure.excuse, at_s=failure.at,
        )  # fmt: skip

    def ended(self, group: str, how: str) -> None:
        """A group has ended for good."""
        self._log.emit("ended", group=group, how=how)

    def order(self, group: str, what: str, reason: str, *, chaos: bool = False) -> None:
        """Something is done to a group."""
        self._log.emit("order", group=group, what=what, reason=reason, chaos=chaos)

    def resized(self, before: int, groups: int) -> None:
        """ftrun resize was obeyed."""
        self._log.emit("resized", before=before, groups=groups)

    def stopping(self, reason: str) -> None:
        """Everything is drained."""
        self._log.emit("stopping", reason=reason)
