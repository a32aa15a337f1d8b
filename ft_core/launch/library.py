"""ftrun without its command line: one replica group, started and supervised from Python.

The interface is that of torch's elastic agent: `run` blocks until the group's workers have ended for good, and returns
what they returned or raises `WorkerGroupFailureException` with what they raised. Everything else is ftrun's: restarts
with their budget, the lighthouse if none is named, signals (where `run` is called on the main thread), and no process
that outlives this one.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from ft_core.errors import ConfigError, FaultToleranceError, UsageError
from ft_core.launch import call
from ft_core.launch.control_socket import base_folder
from ft_core.launch.options import parse
from ft_core.launch.output.status_screen import Screen
from ft_core.launch.processes.keeper import Keeper
from ft_core.launch.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.elastic.agent.server.api import WorkerGroup

    from ft_core.launch.group import Group

__all__ = ["DEFAULT_ROLE", "GroupAgent", "WorkerGroupFailureException"]

DEFAULT_ROLE = "default"


class WorkerGroupFailureException(FaultToleranceError):
    """A group's workers did not end well, and are not started again."""

    def __init__(self, msg: str, worker_excs: Mapping[int, Exception]) -> None:
        super().__init__(msg)
        self._worker_excs = dict(worker_excs)

    def get_worker_exceptions(self) -> dict[int, Exception]:
        """What the workers raised, by global rank; of a worker that could not tell, how its process ended."""
        return self._worker_excs


class GroupAgent:
    """Runs one replica group and supervises it. Usage::

        agent = GroupAgent(train, ("cifar",), nproc=2)
        try:
            return agent.run()[0]
        except WorkerGroupFailureException as failure:
            log.error("rank 0 failed with: %s", failure.get_worker_exceptions()[0])

    Args:
        entrypoint: a function that pickle finds by its name, called in each worker; or the path of a script.
        args: for the function, or the script's arguments.
        nproc: workers of the group.
        replica: number of this group in the job.
        num_replicas: groups of the whole job. More than one needs a lighthouse.
        lighthouse: host:port, or two with a comma between; None: FT_LIGHTHOUSE, else one is embedded.
        max_restarts: of the group within an hour.
        options: further options of ftrun's command line.

    Raises:
        ConfigError: something cannot work; names it, its value and what to do.
    """

    def __init__(
        self,
        entrypoint: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        *,
        nproc: int = 1,
        replica: int = 0,
        num_replicas: int = 1,
        lighthouse: str | None = None,
        max_restarts: int = 10,
        options: Sequence[str] = (),
    ) -> None:
        named = lighthouse or os.environ.get("FT_LIGHTHOUSE") or os.environ.get("TORCHFT_LIGHTHOUSE")
        if num_replicas > 1 and not named:
            raise ConfigError(
                f"num_replicas={num_replicas}: groups that are started one by one need a common lighthouse; start one "
                "with `ft-lighthouse`, and pass lighthouse='host:port' or set FT_LIGHTHOUSE"
            )
        which = ["--replica", str(replica), "--num-replicas", str(num_replicas)] if named else ["--replicas", "1"]
        self._options = [
            *which, *(["--lighthouse", lighthouse] if lighthouse else []), "--nproc-per-replica", str(nproc),
            "--max-restarts", str(max_restarts), *options,
        ]  # fmt: skip
        self._entrypoint, self._args, self._replica = entrypoint, tuple(args), replica if named else 0
        if callable(entrypoint):
            try:
                self._call = pickle.dumps((entrypoint, self._args))
            except Exception as error:
                raise ConfigError(
                    f"entrypoint={entrypoint!r} with args={self._args!r} cannot be sent to another process: {error}; "
                    "use a function of a module's top level, and arguments that pickle takes"
                ) from error
        self._supervisor: Supervisor | None = None

    def __repr__(self) -> str:
        name = self._entrypoint if isinstance(self._entrypoint, str) else self._entrypoint.__name__
        return f"GroupAgent({name}, replica {self._replica})"

    def run(self, role: str = DEFAULT_ROLE) -> dict[int, Any]:
        """Run the group until it has ended for good.

        Args:
            role: of the workers; accepted for compatibility: a group has one.

        Returns:
            What the function returned, by global rank (inside the group). Of a script: None for each rank. Empty if
            the group was drained.

        Raises:
            WorkerGroupFailureException: the workers failed, and restarts were used up or would not help.
            ConfigError, LighthouseError: nothing was started.
            UsageError: it runs already.
        """
        del role
        if self._supervisor is not None:
            raise UsageError("this GroupAgent has run already: make another one")
        folder = tempfile.mkdtemp(prefix="ftrun_call_")
        try:
            return self._run(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """torch's record of the workers; from any thread, once they have been started.

        Raises:
            UsageError: `run` has not come that far.
        """
        del role
        group = self._group()
        if group is None:
            raise UsageError("get_worker_group before the group was started: call run(), in another thread if need be")
        return group.agent.get_worker_group()

    def _group(self) -> Group | None:
        return None if self._supervisor is None else self._supervisor._groups.get(self._replica)

    def _run(self, folder: str) -> dict[int, Any]:
        if isinstance(self._entrypoint, str):
            script = [self._entrypoint, *map(str, self._args)]
        else:
            surroundings = multiprocessing.spawn.get_preparation_data("ftrun")
            surroundings.pop("authkey", None)  # a secret of multiprocessing's own, which it lets nobody write down
            call.put(folder, call.CALL, (surroundings, self._call))
            script = ["--module", "ft_core.launch.call", folder]
        spec = parse([*self._options, *script], os.environ)
        sockets = tempfile.mkdtemp(prefix=f"{spec.run_id}.", dir=base_folder())
        try:
            keeper = Keeper(sockets)
        except BaseException:
            shutil.rmtree(sockets, ignore_errors=True)
            raise
        try:
            self._supervisor = Supervisor(spec, keeper, sockets, Screen())
            self._supervisor.run()
        finally:
            keeper.close()
        group = self._group()
        assert group is not None
        if group.ended == "drained":
            return {}
        results = {rank: call.get(folder, f"result-{rank}") for rank in range(spec.nproc)}
        if group.ended == "finished":
            return {rank: None if value is None else value[0] for rank, value in results.items()}
        failure = group.agent.failure
        raised = {rank: call.get(folder, f"error-{rank}") for rank in range(spec.nproc)}
        told: dict[int, Exception] = {rank: error for rank, error in raised.items() if error is not None}
        if failure is not None and failure.local_rank not in told:
            told[failure.local_rank] = RuntimeError(str(failure))
        raise WorkerGroupFailureException(
            f"{group.name}: {group.agent.quarantine or group.ended}: {failure or 'no worker failed'}", told
        )
