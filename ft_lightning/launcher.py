"""One machine, no launcher: `python train.py` becomes the supervisor of its own replica groups.

How it works. `launcher` is the Lightning launcher of a strategy that nobody has launched. When `fit` (with Fabric:
`launch`) is called, it finds out how this process was started, and runs ftrun on the same command line: an embedded
lighthouse, a keeper, and one supervised process per device that runs the whole script again and finds itself in a
replica group (`placement`). The starting process then ends with the job's status, so whatever follows `fit` in the
script runs in the groups only. `validate`, `test`, `predict` and the Tuner run in the process itself, on one device.

GPUs are not divided by CUDA_VISIBLE_DEVICES here: every process sees what the script's `devices=` names, and takes its
own (`placement.keep`).

Threads: the main thread, as ftrun takes the signals.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from ft_core.errors import ConfigError
from ft_lightning import _compat, names
from ft_lightning import placement as _placement
from ft_lightning.arguments import check_surroundings
from ft_lightning.placement import CHILD, Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CANNOT = "strategy='fault_tolerant' cannot start replica groups"
ELSEWHERE = (
    "start it with a launcher (ftrun --replicas 3 train.py), or write the script to a file and run it with Python; "
    "validate, test and predict work here"
)
PARTS = ("FT_REPLICA_GROUP", "FT_NUM_REPLICA_GROUPS", "FT_REPLICA_ID")
"""Variables that say that there is more of this job elsewhere."""


class GroupLauncher:
    """The launcher, to be mixed with Lightning's class of one tree."""

    def __init__(self, strategy: StartsGroups) -> None:
        super().__init__()
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """True: everything but training works in Jupyter, and training is refused with a reason."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Train in replica groups and end this process; call any other function here."""
        trainer = kwargs.pop("trainer", None)
        if trainer is not None and (trainer.state.fn != "fit" or _compat.tunes(trainer)):
            return function(*args, **kwargs)
        strategy = self._strategy
        strategy.check_start()
        check(os.environ, strategy.wanted_devices, strategy.num_nodes)  # type: ignore[attr-defined]
        check_quorum(strategy._arguments.min_replicas, strategy.wanted_devices)
        command = own_command()
        if trainer is not None:
            _compat.silence(trainer)
        return supervise(strategy.wanted_devices, command, strategy._arguments.for_ftrun())

    def kill(self, signum: int) -> None:
        """There are no processes while Lightning is at work."""


def launcher(tree: str, strategy: StartsGroups) -> Any:
    """A GroupLauncher that is a launcher of `tree`."""
    return type("GroupLauncher", (GroupLauncher, _compat.launcher_base(tree)), {"__module__": __name__})(strategy)


class StartsGroups(Placed):
    """The part of a strategy of either kind that starts replica groups, where nobody has launched this process."""

    def check_start(self) -> None:
        """See that this process may start the groups. Raises ConfigError."""

    def _configure_launcher(self) -> None:
        """Called by Lightning once devices and nodes are known."""
        host = "Fabric" if self._tree in _compat.FABRICS else "Trainer"
        this: Any = self
        check_surroundings(
            this.accelerator, this.precision if host == "Fabric" else this.precision_plugin, strategy=self._name
        )
        _placement.check(self.place, self.wanted_devices, this.num_nodes, host)
        _placement.BY_DEVICE.check(this.root_device)
        self._launcher = None if self.place.launched else launcher(self._tree, self)


def check(environ: Mapping[str, str], devices: int, nodes: int) -> None:
    """Whether this process may start the job.

    Raises:
        ConfigError: it may not; says what to do.
    """
    if nodes != 1:
        raise ConfigError(
            f"num_nodes={nodes} without a launcher: a script can start its replica groups on its own machine only; for "
            "several machines run ftrun on each (ftrun --replica N --num-replicas M --lighthouse host:port train.py)"
        )
    if devices < 1:
        raise ConfigError(f"devices={devices} must be at least 1: the number of replica groups to start")
    for name in PARTS:
        if environ.get(name):
            raise ConfigError(
                f"{name}={environ[name]} says that this process is a part of a job, but FT_LIGHTHOUSE does not say "
                f"where its lighthouse is: set it to host:port, or leave out {name}"
            )
    if environ.get("LOCAL_RANK") or environ.get("WORLD_SIZE", "1") != "1":
        name = "LOCAL_RANK" if environ.get("LOCAL_RANK") else "WORLD_SIZE"
        raise ConfigError(
            f"{name}={environ[name]} says that somebody launched this process as one of several, but no lighthouse is "
            f"named: set FT_LIGHTHOUSE=host:port, use ftrun, or leave out {name}"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(f"training was started in a thread that cannot take signals: {ELSEWHERE}")


def check_quorum(min_replicas: int | None, devices: int) -> None:
    """Whether the groups that this process starts can ever be enough. Raises ConfigError."""
    if min_replicas is not None and min_replicas > devices:
        raise ConfigError(
            f"min_replicas={min_replicas} with devices={devices}: a replica group is started for each device, so there "
            f"would never be enough to train. Write devices={min_replicas} or more, or min_replicas={devices} or less"
        )


def own_command() -> list[str]:
    """How ftrun is to start what runs here: ['train.py', ...] or ['--module', 'package.train', ...].

    Raises:
        ConfigError: what runs here is no script: Jupyter, an interactive Python, -c, standard input.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    if hasattr(sys, "ps1"):
        raise ConfigError(f"{CANNOT} from an interactive Python: {ELSEWHERE}")
    if spec is not None and spec.name and spec.name != "__main__":
        return ["--module", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    if not path or not os.path.isfile(path):
        how = "python -c" if sys.argv[:1] == ["-c"] else "standard input or an archive"
        raise ConfigError(f"{CANNOT} of a program from {how}: {ELSEWHERE}")
    return [os.path.abspath(path), *sys.argv[1:]]


def supervise(groups: int, command: list[str], options: list[str]) -> NoReturn:
    """Run that many groups to the end of the job, then end this process with the job's status."""
    from ft_core.launch.__main__ import main

    run_id = secrets.token_hex(4)
    os.environ[CHILD] = f"{run_id}:{groups}"
    if names.STARTED_IN:
        os.chdir(names.STARTED_IN)  # the command line was meant for there
    sys.exit(main(["--replicas", str(groups), "--run-id", run_id, "--gpus", "all", *options, *command]))
