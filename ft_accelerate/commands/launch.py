"""`ft-accelerate launch`: accelerate launch for replica groups.

How it works. accelerate's own parser reads the command line, with one group of options more. The config file's
`fault_tolerance_config` section is taken out; accelerate validates the rest and prepares the environment for it as
ever. ftrun (`ft_core.launch`) then starts `replicas` groups of `num_processes` processes each with that environment (on
CPUs of one, as accelerate does), and supervises them. With `enabled: false` accelerate's own launcher does everything.

Threads: the main one; ftrun takes the signals.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from ft_accelerate._compat import launch as _compat_launch
from ft_accelerate.launch_options import exported, ftrun_options, in_our_words, resolve
from ft_accelerate.options import FLAG, OPTIONS, suggestion
from ft_accelerate.yaml_config import default_accelerate_file, find, normalised, plain
from ft_core.errors import ConfigError
from ft_core.launch.options import parse

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from ft_accelerate.launch_options import Given
    from ft_accelerate.yaml_config import Document

REFUSED = {
    "use_deepspeed": "DeepSpeed", "use_megatron_lm": "Megatron-LM", "tpu": "TPUs", "tpu_use_cluster": "TPU pods",
    "mpirun_hostfile": "mpirun",
}  # fmt: skip
"""Options of accelerate with which it launches what no replica group can be."""
FORWARDED = ("tee", "log_dir", "monitor_interval")
"""Options of accelerate launch that ftrun has, too."""
PREFIX = FLAG.lstrip("-")
PLAIN_DEFAULTS = {"tee": "0", "monitor_interval": 0.1, "max_restarts": 0, "role": "default"}
"""The defaults of `accelerate launch`."""
ALIASES = {"max_restarts": "max_restarts", "role": "name"}
"""Options of accelerate launch that are options of ours, by another name or with another default."""


def parser() -> Any:
    """accelerate launch's options and ours."""
    out = _compat_launch.parser()
    out.prog = "ft-accelerate launch"
    group = out.add_argument_group(
        "Fault Tolerance Arguments",
        "The same settings as in the fault_tolerance_config section of the config file. num_processes, there and here, "
        "is the number of processes of one replica group.",
    )
    for option in OPTIONS.values():
        group.add_argument(
            option.flag, type=str, default=None, metavar=option.name.upper(), help=option.help.replace("%", "%%")
        )
    # So that it can be told whether they were given: ftrun's defaults are others.
    out.set_defaults(**dict.fromkeys((*FORWARDED, *ALIASES)))
    return out


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the job's exit status.

    Raises:
        ConfigError: the command line, the config file or the environment cannot work; nothing was started.
    """
    args = read(argv)
    document = find(args.config_file)
    given = settings(args, document, os.environ)
    enabled = given.get("enabled")
    if enabled is not None and not enabled.value:
        return _plain(args, document, given)
    with _accelerates(args, document):
        _fill(args, document, given)
        args = _compat_launch.validated(args)
    _refuse(args)
    one_on_cpus(args, document)
    command = [*ftrun_options(given), *group_options(args, given), *script(args)]
    environ = {**exported(given, os.environ), **_compat_launch.environment(args), **fsdp_on_cpus(args)}
    try:
        parse(command, environ)
    except ConfigError as error:
        raise ConfigError(in_our_words(str(error), given)) from None
    from ft_core.launch.__main__ import main as ftrun

    with _environment(environ):
        return ftrun(command)


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: one of our options is misspelt.
    """
    known = parser()
    args, unknown = known.parse_known_args(list(argv))
    for word in unknown:
        name = word.partition("=")[0].replace("-", "_").lstrip("_")
        if name.startswith(PREFIX):
            flags = [option.flag for option in OPTIONS.values()]
            raise ConfigError(f"there is no option {word.partition('=')[0]}{suggestion('--' + name, flags)}")
    if unknown:
        known.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args  # type: ignore[no-any-return]


def settings(args: argparse.Namespace, document: Document, environ: Mapping[str, str]) -> dict[str, Given]:
    """Our options, from wherever they were given."""
    flags = {name: value for name in OPTIONS if (value := getattr(args, PREFIX + name)) is not None}
    aliases = {}
    for theirs, name in ALIASES.items():
        value = getattr(args, theirs)
        if value is not None and name not in flags:
            flags[name], aliases[name] = str(value), f"--{theirs}"
    return resolve(flags, document.section, environ, aliases)


@contextlib.contextmanager
def _accelerates(args: argparse.Namespace, document: Document) -> Iterator[None]:
    """`args` with a config file that accelerate can read."""
    if not document.path:
        yield
        return
    normalised(document)  # says which file is meant if it cannot be read
    with plain(document) as path:
        args.config_file = path
        yield


def _plain(args: argparse.Namespace, document: Document, given: Mapping[str, Given]) -> int:
    """Launch without fault tolerance, which is off."""
    for name, usual in PLAIN_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, usual)
    with _accelerates(args, document), _environment(exported(given, os.environ)):
        _compat_launch.plain_launch(args)
    return 0


def _fill(args: argparse.Namespace, document: Document, given: Mapping[str, Given]) -> None:
    """Where neither command line nor file say it: how many processes a group has, and on what they run."""
    import torch

    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not document.path and default_accelerate_file() is None:
        if args.num_processes is None:
            groups = int(given["replicas"].value.partition(":")[0]) if _counts(given) else max(1, devices)
            args.num_processes = max(1, devices // groups)
        for name, usual in (("num_machines", 1), ("mixed_precision", "no"), ("dynamo_backend", "no")):
            if getattr(args, name) is None:
                setattr(args, name, usual)
    others = args.multi_gpu or args.tpu or args.use_deepspeed or args.use_fsdp or args.use_megatron_lm
    if not (devices or others or kind_of(document) == "FSDP"):
        args.cpu = True  # else accelerate takes the processes of a group for unrelated ones


def one_on_cpus(args: argparse.Namespace, document: Document) -> None:
    """On CPUs accelerate launch starts one process on each machine, whatever num_processes says, and so does this.

    Args:
        args: validated; changed.
        document: the config file, which may ask for more by its distributed_type MULTI_CPU.
    """
    machines, processes = args.num_machines or 1, args.num_processes or 1
    if kind_of(document) == "MULTI_CPU" or processes <= machines or not (args.cpu or getattr(args, "use_cpu", False)):
        return
    args.num_processes = machines
    print(
        f"ft-accelerate: num_processes={processes} on CPUs: each replica group has one process per machine, as with "
        f"accelerate launch. For groups of {processes} write distributed_type: MULTI_CPU into the config file; for "
        f"{processes} replica groups, which survive each other's loss, {FLAG}replicas {processes}",
        file=sys.stderr,
    )


def kind_of(document: Document) -> str:
    """The distributed_type in the config file, which is "DistributedType.MULTI_CPU" where accelerate wrote it."""
    return str(document.rest.get("distributed_type", "")).rpartition(".")[2]


def fsdp_on_cpus(args: argparse.Namespace) -> dict[str, str]:
    """Where there are only CPUs Accelerate must be told, or it takes the processes of a group for unrelated ones.

    Args:
        args: validated.
    """
    import torch

    return {"ACCELERATE_USE_CPU": "true"} if args.use_fsdp and not torch.accelerator.is_available() else {}


def _counts(given: Mapping[str, Given]) -> bool:
    replicas = given.get("replicas")
    return replicas is not None and replicas.value.partition(":")[0].isdecimal() and int(replicas.value[0]) > 0


def _refuse(args: argparse.Namespace) -> None:
    for name, what in REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(
                f"--{name}: fault tolerance does not work with {what}; leave it out, or train without (--ft_enabled no)"
            )
    if args.use_fsdp and str(args.fsdp_version) != "2":
        raise ConfigError(
            f"fsdp_version {args.fsdp_version}: fault tolerance works with FSDP2 only; write `fsdp_version: 2` into "
            "the fsdp_config of the config file (`accelerate to-fsdp2` converts one), or --fsdp_version 2"
        )
    replicas = getattr(args, "parallelism_config_dp_replicate_size", None)
    if getattr(args, "use_parallelism_config", False) and int(replicas or 1) > 1:
        raise ConfigError(
            f"parallelism_config_dp_replicate_size {replicas}: replicas of the model are the replica groups, which "
            f"survive each other's loss; leave it out, and start {replicas} times as many groups ({FLAG}replicas)"
        )
    if args.rdzv_conf:
        raise ConfigError(f"--rdzv_conf {args.rdzv_conf}: leave it out; the processes of a group meet through ftrun")


def group_options(args: argparse.Namespace, given: Mapping[str, Given]) -> list[str]:
    """ftrun's options for what accelerate's say about one group.

    Args:
        args: validated.
        given: our options.

    Raises:
        ConfigError: they do not fit together.
    """
    machines, processes = args.num_machines or 1, max(1, args.num_processes or 1)
    if processes % machines:
        raise ConfigError(
            f"num_processes={processes} of a group on num_machines={machines} machines: every machine must have the "
            "same number of them"
        )
    out = [f"--nproc-per-replica={processes // machines}"]
    if machines > 1:
        if "replica_group" not in given:
            raise ConfigError(
                f"num_machines={machines} would make one replica group of all of them. For groups on each machine "
                f"write num_machines: 1 and {FLAG}replicas, {FLAG}replica_offset and {FLAG}lighthouse on each; for a "
                f"group that spans machines name it with {FLAG}replica_group"
            )
        if not args.main_process_ip or not args.main_process_port:
            raise ConfigError(
                f"num_machines={machines}: --main_process_ip and --main_process_port say where the machines of the "
                "group meet"
            )
        out += [f"--nnodes={machines}", f"--rdzv-endpoint={args.main_process_ip}:{args.main_process_port}"]
    if args.cpu and "gpus" not in given:
        out.append("--gpus=none")
    if "replicas" not in given and "replica_group" not in given:
        out.append(f"--replicas={_fitting(processes, args.cpu)}")
    out += [
        f"--{name.replace('_', '-')}={value}" for name in FORWARDED if (value := getattr(args, name)) is not None
    ]  # fmt: skip
    return out


def _fitting(processes: int, cpu: bool) -> int:
    """How many groups this machine has devices for; 1 without any."""
    import torch

    devices = 0 if cpu or not torch.accelerator.is_available() else torch.accelerator.device_count()
    return max(1, devices // processes)


def script(args: argparse.Namespace) -> list[str]:
    """The script and its arguments as ftrun reads them.

    Raises:
        ConfigError: --module and --no_python together.
    """
    if args.module and args.no_python:
        raise ConfigError("--module and --no_python exclude each other: leave one of them out")
    how = ["--module"] if args.module else ["--no-python"] if args.no_python else []
    return [*how, args.training_script, *args.training_script_args]


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """`environ` as this process's, which its children inherit."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environ)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
