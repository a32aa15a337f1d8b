"""ftrun's options as argparse knows them: names, help, and the messages about those that it does not know.

How it works. Every option may be written with - or _; help shows one spelling. Whatever argparse refuses becomes a
ConfigError that names the option, the value and what to do. What options mean together is `options`' business.
"""

from __future__ import annotations

import argparse
import difflib
import re
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ft_core.access import ADMIN_TOKEN_FILE
from ft_core.errors import ConfigError
from ft_core.launch.exit_status import ALL, SUCCESS
from ft_core.rpc.channel import release

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """ftrun [options] script [arguments]
       ftrun resize N [--run-id ID]"""
EXAMPLES = """examples:
  ftrun --replicas 4 train.py                            four groups of one worker here, with a lighthouse
  ftrun --replicas 4 --nproc-per-replica 2 train.py      four groups of two workers
  ftrun --replica 3 --lighthouse host:29510 train.py     group 3 of a bigger job, for example as a Slurm task
  ftrun --replicas 3 --chaos kill=30s,seed=7 train.py    try your script: kills one of its groups every 30 s"""


TORCHRUNS = {
    "--group-rank": "leave it out; the hosts of a group number themselves where they meet (--rdzv-endpoint)",
    **dict.fromkeys(
        ("--run-path", "--local-ranks-filter", "--logs-specs",
         "--log-line-prefix-template", "--numa-binding", "--virtual-local-rank", "--signals-to-handle",
         "--duplicate-stdout-filters", "--duplicate-stderr-filters"),
        "leave it out; ftrun has nothing like it",
    ),
}  # fmt: skip
"""Options of torchrun that mean nothing here, and what to do instead."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and suggests what was meant."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self._explain(message)} (ftrun --help lists the options)")

    def _explain(self, message: str) -> str:
        if message.startswith("the following arguments are required"):
            return "no script is named; usage: ftrun [options] script [arguments]"
        if found := re.match(r"unrecognized arguments: (\S+)", message):
            return self._unknown(found[1].partition("=")[0])
        if not (found := re.match(r"argument (\S+): (.*)", message, re.DOTALL)):
            return message
        option = next((name for name in found[1].split("/") if name.startswith("--")), found[1])
        action = self._option_string_actions.get(option)
        if action is not None and "expected one argument" in found[2]:
            what = action.metavar or (", ".join(action.choices) if action.choices else action.dest)
            return f"{option} needs a value: {what}"
        if bad := re.match(r"invalid (int|float) value: '?(.*?)'?$", found[2]):
            return f"{option} {bad[2]} must be a {'whole number' if bad[1] == 'int' else 'number of seconds'}"
        if action is not None and action.choices and (bad := re.match(r"invalid choice: '(.*?)'", found[2])):
            near = difflib.get_close_matches(bad[1], action.choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"{option} {bad[1]} must be one of {', '.join(action.choices)}{hint}"
        return f"{option}: {found[2]}"

    def _unknown(self, option: str) -> str:
        torchruns = TORCHRUNS.get("--" + option.lstrip("-").replace("_", "-"))
        if torchruns is not None:
            return f"{option} is torchrun's: {torchruns}"
        known = [name for action in self._actions for name in action.option_strings if "_" not in name]
        near = difflib.get_close_matches(option.replace("_", "-"), known, 1)
        return f"there is no option {option}" + (f"; did you mean {near[0]}?" if near else "")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each option."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = argparse.Action(
            [name for name in action.option_strings if "_" not in name], action.dest, action.nargs,
            metavar=action.metavar, choices=action.choices,
        )  # fmt: skip
        return super()._format_action_invocation(shown if action.option_strings else action)


def parser() -> argparse.ArgumentParser:
    """The parser of ftrun's options."""
    out = _Parser(
        prog="ftrun", usage=USAGE, epilog=EXAMPLES, allow_abbrev=False,
        description="Launches, supervises and restarts the replica groups of a fault-tolerant training job.",
        formatter_class=_Formatter,
    )  # fmt: skip

    for add_group in (_which, _control, _restart, _output, _run):
        add_group(out)
    out.add_argument("--version", action="version", version=f"ftrun {release()}")
    out.add_argument("script", help="training script, its arguments follow")
    out.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return out


def _option(group: argparse._ArgumentGroup, *names: str, **more: Any) -> None:
    """Add an option that may be spelled with hyphens or underscores."""
    spelled = [other for name in names for other in dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
               if name.startswith("--")]  # fmt: skip
    short = [name for name in names if not name.startswith("--")]
    more.setdefault("dest", names[0].lstrip("-").replace("-", "_"))
    group.add_argument(*short, *spelled, **more)


def _which(out: argparse.ArgumentParser) -> None:
    add = partial(_option, out.add_argument_group("which replica groups"))
    add("--replicas", metavar="N[:MAX]", help="groups to run here (default 1); MAX: limit of `ftrun resize`")
    add("--replica", type=int, metavar="I", help="run only group I of a bigger job")
    add("--replica-offset", type=int, default=0, metavar="K", help="number of the first group here")
    add("--num-replicas", type=int, metavar="T", help="groups of the whole job, if more than run here")
    add("--min-replicas", type=int, metavar="M", help="smallest quorum (FT_MIN_REPLICAS, else 1)")
    add("--nproc-per-replica", "--nproc-per-node", default="1", metavar="P",
        help="workers per group on this host: a number, auto, cpu or gpu")  # fmt: skip
    add("--name", default="replica", help="groups are called NAME-0, NAME-1, ... (default replica)")
    add("--gpus", choices=("auto", "all", "share", "none"), default="auto",
        help="auto: divide the visible GPUs among the groups; share: let groups share; all: show all to all; "
        "none: hide all")  # fmt: skip


def _control(out: argparse.ArgumentParser) -> None:
    add = partial(_option, out.add_argument_group("lighthouse and addresses"))
    add("--lighthouse", metavar="HOST:PORT[,HOST:PORT]", help="one, or two of which one stands by for the other "
        "(default FT_LIGHTHOUSE, else one is embedded)")  # fmt: skip
    add("--lighthouse-bind", metavar="HOST:PORT", help="where an embedded one listens (127.0.0.1:0)")
    add(
        "--http",
        metavar="HOST:PORT|off",
        help="where an embedded one has its dashboard (localhost:29511, or a free port)",
    )
    add("--local-addr", metavar="HOST", help="address other hosts reach this one at (default: the one on "
        "the route to the lighthouse)")  # fmt: skip
    add("--insecure", action="store_true", help="let workers that other machines reach listen without FT_TOKEN: "
        "trust the whole network (FT_INSECURE)")  # fmt: skip
    add(ADMIN_TOKEN_FILE, metavar="FILE", help="the token in this file drains groups, and an embedded lighthouse takes "
        "drain and kill with no other; workers do not get it (FT_ADMIN_TOKEN, else FT_TOKEN is enough)")  # fmt: skip
    add("--timeout", type=float, metavar="S", help="FT_TIMEOUT_S: how long a silent peer is waited for")
    add(
        "--nnodes",
        default="1",
        metavar="MIN[:MAX]",
        help="hosts that one group spans; only with "
        "--replica. A range, for a job of one group: it starts again whenever a host comes or is lost",
    )
    add("--rdzv-endpoint", metavar="HOST:PORT", help="where the hosts of one group meet (its first host)")
    add("--rdzv-backend", choices=("c10d", "static"), default="c10d", help=argparse.SUPPRESS)
    # torchrun's, for command lines that have them: on one host they say what is so anyway (options._check_torchruns)
    add("--standalone", action="store_true", help=argparse.SUPPRESS)
    add("--node-rank", help=argparse.SUPPRESS)
    for harmless in ("--master-addr", "--master-port", "--role", "--rdzv-conf", "--start-method",
                     "--event-log-handler"):  # fmt: skip
        add(harmless, help=argparse.SUPPRESS)
    add("--run-id", "--rdzv-id", metavar="ID", help="name of this run (TORCHELASTIC_RUN_ID)")


def _restart(out: argparse.ArgumentParser) -> None:
    add = partial(_option, out.add_argument_group("restarts"))
    add("--max-restarts", type=int, default=10, metavar="N",
        help="of one group within --restart-window (default 10; 0: never)")  # fmt: skip
    add("--restart-window", type=float, default=3600.0, metavar="S", help="seconds (default 3600)")
    add("--crash-loop", type=int, default=3, metavar="K",
        help="a group that dies K times in a row before its first commit is given up (default 3)")  # fmt: skip
    add("--standby", type=int, default=0, metavar="K", help="processes kept ready with all imports done")
    add("--drain-timeout", type=float, default=30.0, metavar="S",
        help="how long a group may take to finish its step and leave (default 30)")  # fmt: skip
    add("--from-scratch", action="store_true", help="let the job begin again at step 0 if every group that "
        "held its state is lost and no checkpoint is loaded; otherwise it ends (FT_FROM_SCRATCH)")  # fmt: skip
    add("--success", choices=SUCCESS, default=ALL,
        help="status 0 when all groups that were not drained finished, or min: --min-replicas")  # fmt: skip
    add("--monitor-interval", type=float, default=0.1, metavar="S",
        help="how often workers are looked at where the kernel does not tell at once")  # fmt: skip
    add("--chaos", metavar="SPEC", help="kill, freeze and drain own groups: kill=30s,stop=60s,seed=7")


def _output(out: argparse.ArgumentParser) -> None:
    add = partial(_option, out.add_argument_group("output"))
    add("--log-dir", metavar="DIR", help="directory for the files of --tee and --redirects")
    add("--events", metavar="DIR", help="directory for the event files that ft-report reads, or off (default: "
        "FT_EVENTS, else one of this run)")  # fmt: skip
    add("--metrics", metavar="HOST:PORT", help="serve metrics for Prometheus there, and those of group N at PORT + 1 + "
        "N; or off (default: FT_METRICS, else off)")  # fmt: skip
    add("--tee", "-t", default="0", metavar="STD", help="1 stdout, 2 stderr, 3 both, or 0:1,1:3 per local "
        "rank: also into a file")  # fmt: skip
    add("--redirects", "-r", default="0", metavar="STD", help="the same, into a file only")


def _run(out: argparse.ArgumentParser) -> None:
    add = partial(_option, out.add_argument_group("what to run"))
    add("--module", "-m", action="store_true", help="the script is a module, as with python -m")
    add("--no-python", action="store_true", help="the script is a program of its own")


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The options as they were given; what follows the script untouched in `arguments`."""
    words = list(argv)
    out = parser().parse_args(words)
    # argparse drops a "--" also where it is the script's.
    after = len(words) - len(out.arguments)
    if words[after - 1] != out.script and words[after - 2] == out.script:
        out.arguments = words[after - 1 :]
    return out


def spellings(option: str) -> tuple[str, ...]:
    """All names of ftrun's option that has this one, the first with `-`; () if there is none."""
    action = parser()._option_string_actions.get(option)
    return () if action is None else tuple(action.option_strings)
