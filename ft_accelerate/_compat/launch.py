"""The parts of accelerate's launcher that are not public API; the rest of the command line uses public names.

How it works. `accelerate launch` is three steps: its parser, `_validate_launch_command`, which fills in what the YAML
and the machine say, and a launcher, which prepares an environment and starts processes. The first two are used as they
are; of the third only the environment, because ftrun starts the processes.

Threads: any.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accelerate.commands import launch
from accelerate.commands.config.config import get_user_input
from accelerate.commands.config.config_args import ClusterConfig, cache_dir, default_config_file, load_config_from_file
from accelerate.commands.env import env_command
from accelerate.test_utils import path_in_accelerate_package
from accelerate.utils import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = [
    "ClusterConfig", "cache_dir", "default_config_file", "env_command", "environment", "get_user_input",
    "load_config_from_file", "parser", "path_in_accelerate_package", "plain_launch", "validated",
]  # fmt: skip
OURS = ("MASTER_ADDR", "MASTER_PORT", "KMP_AFFINITY", "KMP_BLOCKTIME")
"""Variables that accelerate prepares for one process alone: ftrun gives each group its own place, and an affinity would
put all groups on the same cores."""


def parser() -> Any:
    """The argument parser of `accelerate launch`."""
    return launch.launch_command_parser()


def plain_launch(args: argparse.Namespace) -> None:
    """Run `accelerate launch` itself."""
    launch.launch_command(args)


def validated(args: argparse.Namespace) -> argparse.Namespace:
    """`args` with what the config file and the machine say.

    Raises:
        ConfigError: accelerate refuses them.
    """
    args.threads_given = args.num_cpu_threads_per_process is not None or "OMP_NUM_THREADS" in os.environ
    if not args.threads_given:
        args.num_cpu_threads_per_process = 1  # else accelerate counts the cores for one group; ftrun counts the groups
    try:
        out, _, _ = launch._validate_launch_command(args)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error
    return out  # type: ignore[no-any-return]


def environment(args: argparse.Namespace) -> dict[str, str]:
    """The environment that accelerate's launcher would make for the processes: what it adds or changes.

    Args:
        args: validated.

    Raises:
        ConfigError: accelerate refuses them.
    """
    args.main_process_port = 0  # of its own launcher: any free one
    args.num_machines = 1
    many = (args.multi_gpu or args.use_fsdp) and not args.cpu
    try:
        prepared = prepare_multi_gpu_env(args) if many else prepare_simple_launcher_cmd_env(args)[1]
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    ours = OURS if args.threads_given else (*OURS, "OMP_NUM_THREADS")
    return {name: text for name, text in prepared.items() if os.environ.get(name) != text and name not in ours}
