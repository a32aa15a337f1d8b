"""What ftrun's options mean together, and clear errors before anything is started.

How it works. `argument_parser` reads; `parse` resolves (environment, defaults, devices, addresses) and checks into a
`spec.JobSpec`. Whatever cannot work is a ConfigError that names the option, the value and what to do. torch is imported
only where a number of devices is asked for.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING

from ft_core.access import Tokens, check_listener, insecure, own_admin_token
from ft_core.addresses import Addresses, hosts_of
from ft_core.backends import DEVICE_OF, Wish, check_build
from ft_core.certificates import Tls
from ft_core.control.lighthouse.dashboards import AUTO
from ft_core.errors import ConfigError
from ft_core.launch.argument_parser import read
from ft_core.launch.chaos_schedule import ChaosSettings
from ft_core.launch.gpus import divide, visible_gpus
from ft_core.launch.restart_policy import RestartSettings
from ft_core.launch.run_events import OFF, folder_for
from ft_core.launch.spec import JobSpec, Script, Streams
from ft_core.metrics.admission import Admission
from ft_core.metrics.server import checked_address
from ft_core.network import advertised_host
from ft_core.rpc.channel import check_schemes, split_bind
from ft_core.settings import MAX_REPLICAS, Environment, parse_address

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

MAX_S = 366 * 24 * 3600.0
"""No duration is longer: a year."""
MAX_WORKERS = 1024
"""Workers of one group on one host."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
"""A name that is part of file names, of replica ids (which end in ':' and a word) and of the log's prefixes."""
NAME_RULE = "must be at most 40 letters, digits, '-', '_' or '.', and start with a letter or digit"


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> JobSpec:
    """The job that this command line asks for.

    Raises:
        ConfigError: it cannot work; the message names the option and what to do.
    """
    a = read(argv)
    env = Environment.read(environ)
    lighthouse = a.lighthouse or env.lighthouse or ""
    script = _script(a, environ)
    groups, most = _replicas(a)
    first = a.replica if a.replica is not None else a.replica_offset
    total, whole = _total(a, env, first, groups, most)
    min_replicas = _min_replicas(a, env, most if whole else total)
    _check_control(a, env, lighthouse, whole, environ)
    _check_torchruns(a)
    _check_nodes(a, lighthouse, total)
    settings = RestartSettings(max_restarts=a.max_restarts, window_s=a.restart_window, crash_loop=a.crash_loop)
    _check_times(a, env, settings)
    nproc = _nproc(a.nproc_per_replica)
    tee, redirects = _streams(a.tee, "--tee", nproc), _streams(a.redirects, "--redirects", nproc)
    bind, run_id = a.lighthouse_bind or "127.0.0.1:0", _run_id(a.run_id)
    towards = hosts_of(lighthouse, "--lighthouse") or (split_bind(bind, "--lighthouse-bind")[0],)
    host, (token, made_token) = _host(a, env, towards), _token(env, own_lighthouse=not lighthouse, whole=whole)
    admin = own_admin_token(environ, a.admin_token_file or "")
    trusts_all = a.insecure or insecure(environ)
    _check_doors(lighthouse, host, Tokens(token, admin), trusts_all, environ)
    sendable = Tokens("" if made_token else token, admin)
    return JobSpec(
        script=script, run_id=run_id, name=_name(a.name), first=first, groups=groups, max_groups=most,
        total=total, whole_job=whole, min_replicas=min_replicas, success=a.success, nproc=nproc, lighthouse=lighthouse,
        from_scratch=a.from_scratch or env.from_scratch,
        lighthouse_bind=bind, http=_http(a.http, lighthouse), token=token, made_token=made_token, admin_token=admin,
        insecure=trusts_all, host=host, timeout_s=a.timeout, stall_s=a.timeout or env.timeout_s or JobSpec.stall_s,
        connect_s=env.connect_s or JobSpec.connect_s, nodes=_nodes(a)[1], min_nodes=_nodes(a)[0],
        rdzv_endpoint=a.rdzv_endpoint or "", restarts=settings, monitor_s=a.monitor_interval, tee=tee,
        redirects=redirects,
        gpus=tuple(_gpus(a.gpus, most, nproc, env.backend, environ)), standby=a.standby, drain_s=a.drain_timeout,
        chaos=_chaos(a, whole, total),
        log_dir=(log_dir := _log_dir(a.log_dir, any(s.default or s.ranks for s in (tee, redirects)))),  # it creates one
        events=folder_for(a.events, log_dir, run_id, environ),
        **_metrics(a, env, first + most, Admission(sendable, Tls.from_env(environ), trusts_all)),
    )  # fmt: skip


def _http(given: str | None, lighthouse: str) -> str:
    """Where the embedded lighthouse has its dashboard."""
    if lighthouse and given not in (None, OFF):
        raise ConfigError(
            f"--http {given}: the dashboard is the lighthouse's, and the one at {lighthouse} runs elsewhere; give "
            "--http to its ft-lighthouse instead"
        )
    if given not in (None, OFF):
        split_bind(given, "--http")
    return "" if lighthouse or given == OFF else given or AUTO


def _script(a: argparse.Namespace, environ: Mapping[str, str]) -> Script:
    if a.no_python and a.module:
        raise ConfigError("--no-python and --module exclude each other: leave one of them out")
    if a.module:
        _check_module(a.script, environ)
    elif a.no_python:
        if shutil.which(a.script, path=environ.get("PATH")) is None:
            why = "may not be executed (chmod +x?)" if os.path.isfile(a.script) else "cannot be found"
            raise ConfigError(f"--no-python: the program {a.script} {why}")
    else:
        _check_source(a.script)
    return Script(a.script, tuple(a.arguments), a.module, a.no_python)


def _check_source(path: str) -> None:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the script {path}: {error.strerror}{_hint(path)}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers will say so
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        code = f": {error.text.strip()}" if error.text else ""
        raise ConfigError(f"the script does not parse: {path}, line {error.lineno}: {error.msg}{code}") from None
    except ValueError as error:
        raise ConfigError(f"the script does not parse: {path}: {error}") from None


def _hint(path: str) -> str:
    """What somebody who named this as the script may have meant."""
    if difflib.get_close_matches(path, ["resize"], 1):
        return " (did you mean `ftrun resize N`?)"
    if path.isdecimal() or path.startswith("-"):
        return " (options go before the script, each with its value)"
    if os.path.isdir(path) or path.endswith(".py"):
        return ""
    return " (a module? then put -m before it)" if "/" not in path else " (a program? then put --no-python before it)"


def _check_module(name: str, environ: Mapping[str, str]) -> None:
    """Without importing anything: only whether its outermost package is there."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"--module: {name} is no module name such as package.train (a file? then leave out -m)")
    top = name.partition(".")[0]
    if "PYTHON_EXEC" in environ or top in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or importlib.util.find_spec(top):
        return
    raise ConfigError(f"--module: there is no module {top} in {os.getcwd()}, PYTHONPATH or this Python's packages")


def _replicas(a: argparse.Namespace) -> tuple[int, int]:
    if a.replica is not None:
        if a.replicas is not None or a.replica_offset:
            raise ConfigError(f"--replica {a.replica} runs one group: leave out --replicas and --replica-offset")
        return 1, 1
    text = a.replicas if a.replicas is not None else "1"
    found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if not found:
        raise ConfigError(f"--replicas {text} must be a number of groups, or N:MAX such as 4:8")
    groups, most = int(found[1]), int(found[2] or found[1])
    if groups > most:
        raise ConfigError(f"--replicas {text}: the first number may not be the larger one; write {most}:{groups}?")
    if not 1 <= groups <= most <= MAX_REPLICAS:
        raise ConfigError(f"--replicas {text} must be 1 to {MAX_REPLICAS} groups")
    return groups, most


def _total(a: argparse.Namespace, env: Environment, first: int, groups: int, most: int) -> tuple[int, bool]:
    """Groups of the whole job (0: nobody said), and whether all of them run here."""
    option = f"--replica {first}" if a.replica is not None else f"--replica-offset {first}"
    if not 0 <= first <= MAX_REPLICAS - most:
        raise ConfigError(f"{option} must be 0 to {MAX_REPLICAS - most}: a job has at most {MAX_REPLICAS} groups")
    named = a.num_replicas is not None
    total = a.num_replicas if named else env.num_replica_groups
    where = f"--num-replicas {total}" if named else f"FT_NUM_REPLICA_GROUPS={total}"
    if total is None:
        part = a.replica is not None or first > 0
        return (0 if part else groups), not part
    if not 1 <= total <= MAX_REPLICAS:
        raise ConfigError(f"{where} must be 1 to {MAX_REPLICAS}, the groups of the whole job")
    if first + most > total:
        which = option if a.replica is not None else f"groups {first} to {first + most - 1} (--replicas {a.replicas})"
        raise ConfigError(f"{which}: out of range, the job has groups 0 to {total - 1} ({where})")
    return total, total == most


def _min_replicas(a: argparse.Namespace, env: Environment, total: int) -> int:
    named = a.min_replicas is not None
    value: int = a.min_replicas if named else 1 if env.min_replicas is None else env.min_replicas
    if not 1 <= value <= (total or MAX_REPLICAS):
        where = f"--min-replicas {value}" if named else f"FT_MIN_REPLICAS={value}"
        most = f"{total}, the groups of the job" if total else str(MAX_REPLICAS)
        raise ConfigError(f"{where} must be 1 to {most}")
    return value


def _check_control(
    a: argparse.Namespace, env: Environment, lighthouse: str, whole: bool, environ: Mapping[str, str]
) -> None:
    if lighthouse:
        source = "--lighthouse" if a.lighthouse else "FT_LIGHTHOUSE"
        Addresses.parse(lighthouse, source)
        if a.lighthouse_bind:
            raise ConfigError(f"{source} {lighthouse} names a lighthouse and --lighthouse-bind {a.lighthouse_bind} "
                              "embeds one: leave one of them out")  # fmt: skip
        return
    if a.lighthouse_bind:
        split_bind(a.lighthouse_bind, "--lighthouse-bind")
    if whole:
        return
    if not a.lighthouse_bind:
        raise ConfigError(
            "a part of a job (--replica, --replica-offset, --num-replicas, FT_NUM_REPLICA_GROUPS) needs the job's "
            "lighthouse: --lighthouse host:port or FT_LIGHTHOUSE (start one with ft-lighthouse)"
        )
    tls = Tls.from_env(environ)
    if not (env.token or a.insecure or insecure(environ) or (tls is not None and tls.mutual)):
        raise ConfigError(
            f"--lighthouse-bind {a.lighthouse_bind} for groups elsewhere: set FT_TOKEN to the same secret everywhere"
        )


def _check_doors(lighthouse: str, host: str, tokens: Tokens, trusts_all: bool, environ: Mapping[str, str]) -> None:
    """What each worker would find out by itself, after all of them were started."""
    tokens.check()
    tls = Tls.from_env(environ)
    if lighthouse:
        check_schemes(Addresses.parse(lighthouse, "--lighthouse (FT_LIGHTHOUSE)"), tls)
    if tls is not None:
        tls.check_serves("the workers' ranks and state would travel").check_names(host)
    check_listener(
        f"other machines reach the workers at {host} (--local-addr), where they listen", host, tokens.job, tls,
        "whoever does may read the model, or take the place of a rank", trusts_all,
    )  # fmt: skip


def _nodes(a: argparse.Namespace) -> tuple[int, int]:
    """The least and the greatest number of hosts of a group."""
    found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", a.nnodes, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(
            f"--nnodes {a.nnodes} must be the number of hosts that one group spans, or MIN:MAX if hosts may come and go"
        )
    return least, most


def _check_nodes(a: argparse.Namespace, lighthouse: str, total: int) -> None:
    least, most = _nodes(a)
    if most == 1:
        return  # as with torchrun, --rdzv-endpoint may be there and means nothing
    if least < most and total > 1:
        raise ConfigError(
            f"--nnodes {a.nnodes}: all groups of a job have the same number of ranks, so with {total} groups a group "
            f"cannot change its hosts: run each host as a group of its own (--replica-offset), or --nnodes {most}"
        )
    if a.replica is None or not a.rdzv_endpoint:
        raise ConfigError(
            f"--nnodes {a.nnodes}: run one ftrun per host with the same --replica and --rdzv-endpoint host:port"
        )
    parse_address(a.rdzv_endpoint, "--rdzv-endpoint")
    if a.run_id is None:
        raise ConfigError(f"--nnodes {a.nnodes}: give all hosts of the group the same --rdzv-id")
    if not lighthouse:
        raise ConfigError(
            f"--nnodes {a.nnodes}: every host would embed a lighthouse of its own; name one with --lighthouse host:port"
        )


def _check_torchruns(a: argparse.Namespace) -> None:
    """Options of torchrun's that would mean something if there were more than this host."""
    if a.standalone and (a.lighthouse or _nodes(a)[1] > 1):
        other = f"--lighthouse {a.lighthouse}" if a.lighthouse else f"--nnodes {a.nnodes}"
        raise ConfigError(f"--standalone says that the job is on this host alone: leave it out, or {other}")
    if _nodes(a)[1] == 1:
        if a.node_rank not in (None, "0"):
            raise ConfigError(f"--node-rank {a.node_rank}: with --nnodes {a.nnodes} there is only host 0; leave it out")
        return
    for option, value in (("--node-rank", a.node_rank), ("--master-addr", a.master_addr),
                          ("--master-port", a.master_port)):  # fmt: skip
        if value is not None:
            raise ConfigError(
                f"{option} {value} is torchrun's: leave it out; the hosts of a group meet at --rdzv-endpoint host:port "
                "and number themselves there"
            )
    if a.rdzv_backend != "c10d":
        raise ConfigError(f"--rdzv-backend {a.rdzv_backend}: with --nnodes {a.nnodes} only c10d is there")


def _check_times(a: argparse.Namespace, env: Environment, settings: RestartSettings) -> None:
    settings.check()
    for option in ("timeout", "drain_timeout", "monitor_interval"):
        value = getattr(a, option)
        if value is not None and not 0 < value <= MAX_S:
            raise ConfigError(f"--{option.replace('_', '-')} {value:g} must be more than 0 and at most {MAX_S:.0f} "
                              "seconds")  # fmt: skip
    for name, value in (("FT_TIMEOUT_S", env.timeout_s), ("FT_CONNECT_S", env.connect_s)):
        if value is not None and not 0 < value <= MAX_S:
            raise ConfigError(f"{name}={value:g} must be more than 0 and at most {MAX_S:.0f} seconds")
    if not 0 <= a.standby <= MAX_REPLICAS:
        raise ConfigError(f"--standby {a.standby} must be 0 to {MAX_REPLICAS} processes")


def _chaos(a: argparse.Namespace, whole: bool, total: int) -> ChaosSettings | None:
    if a.chaos is None:
        return None
    if a.max_restarts == 0:
        raise ConfigError("--chaos needs restarts: leave out --max-restarts 0")
    if not whole and not total:
        raise ConfigError(
            "--chaos for a part of a job needs --num-replicas: every ftrun draws the same acts over all groups of the "
            "job and performs those that hit its own"
        )
    return ChaosSettings.parse(a.chaos)


def _token(env: Environment, *, own_lighthouse: bool, whole: bool) -> tuple[str, bool]:
    """The job's token, and whether it was made here: for a lighthouse that only this ftrun's groups come to."""
    if env.token or not (own_lighthouse and whole):
        return env.token, env.made_token
    return secrets.token_hex(16), True


def _metrics(a: argparse.Namespace, env: Environment, groups: int, admission: Admission) -> dict[str, str]:
    """Where metrics are served, and what said so; there must be a port for each of the groups up to this number."""
    setting, given = ("FT_METRICS", env.metrics) if a.metrics is None else ("--metrics", a.metrics)
    if given in ("", OFF):
        return {}
    _, port = checked_address(given, setting, admission)
    if port and port + groups > 65535:
        raise ConfigError(
            f"{setting} {given}: group N serves its metrics at port {port} + 1 + N, and there are {groups} groups: use "
            f"a port of at most {65535 - groups}"
        )
    address = given.removeprefix("http://").removesuffix("/metrics")
    return {"metrics": address, "metrics_setting": setting}


def _host(a: argparse.Namespace, env: Environment, towards: tuple[str, ...]) -> str:
    """What the workers advertise. A name that nobody can resolve would only time out, much later."""
    option, given = ("--local-addr", a.local_addr) if a.local_addr else ("FT_HOSTNAME", env.hostname)
    if given:
        try:
            socket.getaddrinfo(given, None)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no host name"
            raise ConfigError(f"{option} {given} is no address of this host: {why}; leave it out, or give one that the "
                              "other hosts can reach") from None  # fmt: skip
    return advertised_host(given, env.interface, *towards)


def _nproc(text: str) -> int:
    if re.fullmatch(r"[0-9]{1,6}", text) and 1 <= int(text) <= MAX_WORKERS:
        return int(text)
    if text not in ("auto", "cpu", "gpu"):
        raise ConfigError(f"--nproc-per-replica {text} must be 1 to {MAX_WORKERS} workers, auto, cpu or gpu")
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(text))
    except ValueError as error:
        raise ConfigError(f"--nproc-per-replica {text}: {error}") from None


def _gpus(mode: str, groups: int, nproc: int, backend: str, environ: Mapping[str, str]) -> list[str | None]:
    if backend in DEVICE_OF:
        from ft_core.process_group.availability import torch_build

        said = f"FT_BACKEND={backend}"
        if mode == "none":
            raise ConfigError(f"{said} with --gpus none: {backend} needs devices; leave out one of the two")
        check_build(backend, Wish(backend, said), torch_build())
    visible: list[str] = []
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None and mode in ("auto", "share"):
        visible = visible_gpus(named)
    elif named is None and mode in ("auto", "share") and os.path.exists("/dev/nvidiactl"):
        import torch

        visible = [str(index) for index in range(torch.cuda.device_count())]
    return divide(visible, groups, nproc, mode)


def _streams(text: str, option: str, nproc: int) -> Streams:
    if re.fullmatch(r"[0-3]", text):
        return Streams(int(text))
    if not re.fullmatch(r"[0-9]{1,6}:[0-3](,[0-9]{1,6}:[0-3])*", text):
        raise ConfigError(f"{option} {text} must be 0, 1 (stdout), 2 (stderr), 3 (both), or a list like 0:1,1:3")
    ranks: dict[int, int] = {}
    for part in text.split(","):
        rank, _, bits = part.partition(":")
        if int(rank) in ranks:
            raise ConfigError(f"{option} {text}: local rank {rank} is named twice")
        if int(rank) >= nproc:
            raise ConfigError(f"{option} {text}: there is no local rank {rank}, --nproc-per-replica is {nproc}")
        ranks[int(rank)] = int(bits)
    return Streams(0, ranks)


def _log_dir(folder: str | None, needed: bool) -> str:
    if folder is None:
        return tempfile.mkdtemp(prefix="ftrun_logs_") if needed else ""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--log-dir {folder}: cannot write there: {error.strerror}") from None
    return os.path.abspath(folder)


def _name(given: str) -> str:
    if not NAME.fullmatch(given):
        raise ConfigError(f"--name {given!r} {NAME_RULE}")
    return given


def _run_id(given: str | None) -> str:
    if given is None:
        return secrets.token_hex(4)
    if not NAME.fullmatch(given):
        raise ConfigError(f"--run-id {given!r} {NAME_RULE}")
    return given
