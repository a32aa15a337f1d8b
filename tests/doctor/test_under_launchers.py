"""ft-doctor in the place of the script: under ftrun, on each host or with two groups on one, and under torchrun."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chaos.network import Network, available
from tests.doctor.hosts import END_S, ROOMY, Host, environment, examine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WHY = available()
pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.skipif(bool(WHY), reason=WHY)]
BIN = Path(sys.executable).parent
FTRUN = [str(BIN / "ftrun"), "--max-restarts", "0", "--events", "off"]
DOCTOR = ["--no-python", str(BIN / "ft-doctor"), "--no-bandwidth"]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["a", "b", "c", "d", "head"]) as made:
        yield made


def run(network: Network, commands: Mapping[str, Sequence[str]], **env: str) -> dict[str, tuple[int, str, str]]:
    """Exit status, stdout and stderr of each host's launcher."""
    with contextlib.ExitStack() as stack:
        started = {}
        for name, command in commands.items():
            roomy = network.on(name, ["sh", "-c", f'{ROOMY} && exec "$@"', "sh", *command])
            process = subprocess.Popen(roomy, env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True)  # fmt: skip
            started[name] = stack.enter_context(process)
        for process in started.values():
            stack.callback(process.kill)
        said = {name: process.communicate(timeout=END_S) for name, process in started.items()}
        return {name: (process.returncode, *said[name]) for name, process in started.items()}


@contextlib.contextmanager
def lighthouse(network: Network, on: str, token: str) -> Iterator[str]:
    """A real one."""
    where = f"{network.address(on)}:29510"
    command = network.on(on, [str(BIN / "ft-lighthouse"), "--bind", where])
    with subprocess.Popen(command, env=environment({"FT_TOKEN": token}), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "29510" in line:
                    break
            yield where
        finally:
            process.terminate()


def test_two_groups_of_one_host_and_a_problem(network: Network) -> None:
    """It ends the run of ftrun with a status."""
    options = [*DOCTOR, "--storage", "/nowhere"]
    (status, out, err) = run(network, {"a": [*FTRUN, "--replicas", "2", *options]})["a"]
    assert status == 1, (out, err)
    assert "/nowhere cannot be written: No such file or directory" in out
    assert not Path("/nowhere").exists()
    assert "2 have come, on 1 machine" in out
    assert out.count("each reaches each other one") == 1, "printed once"
    assert "what was found is printed once for all hosts" in err
    assert "trains by itself" not in err, "it is no script without a Manager"


@pytest.mark.parametrize("where", [pytest.param("a", marks=pytest.mark.long), "head"])
def test_a_group_on_each_of_two_hosts(where: str, network: Network) -> None:
    """The lighthouse is on one of the job's hosts, or has one of its own."""
    with lighthouse(network, where, "ours") as address:
        job = [*FTRUN, "--num-replicas", "2", "--lighthouse", address]
        commands = {name: [*job, "--replica", str(i), *DOCTOR] for i, name in enumerate("ab")}
        found = run(network, commands, FT_TOKEN="ours")
    assert [status for status, _, _ in found.values()] == [0, 0], found
    both = "".join(out for _, out, _ in found.values())
    assert "2 have come, on 2 machines" in both
    assert f"{address} answers in" in both
    assert both.count("each reaches each other one") == 1, "printed once"


def test_a_host_without_the_token_is_told_by_itself_and_missed_by_the_other(network: Network) -> None:
    """Without it there is no way to learn where the others meet."""
    with lighthouse(network, "head", "ours") as address:
        env = {"FT_LIGHTHOUSE": address, "FT_NUM_REPLICA_GROUPS": "2"}
        options = ["--no-bandwidth", "--wait", "3"]
        found = examine(
            network,
            {
                "a": Host({**env, "FT_REPLICA_GROUP": "0", "FT_TOKEN": "ours"}, options),
                "b": Host({**env, "FT_REPLICA_GROUP": "1", "FT_TOKEN": "theirs"}, options),
            },
            where="",
        )
    assert found["a"].about("hosts", "PROBLEM")["text"] == "1 of 2 have come: a/0"
    assert "FT_TOKEN differs" in found["b"].about("token", "PROBLEM")["text"]


def test_torchrun_on_two_hosts(network: Network) -> None:
    """Two processes on each, of which the first one takes part."""
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
        "--master-addr", network.address("a"), "--master-port", "29400",
    ]  # fmt: skip
    commands = {name: [*torchrun, "--node-rank", str(i), *DOCTOR, "--json"] for i, name in enumerate("ab")}
    found = run(network, commands)
    printed = [out for _, out, _ in found.values()]
    text = next(out for out in printed if "have come" in out)
    assert "2 have come, on 2 machines" in text
    assert "(by MASTER_ADDR and GROUP_WORLD_SIZE)" in "".join(err for _, _, err in found.values())
    assert sum("have come" in out for out in printed) == 1, "printed once"


def test_groups_that_span_hosts(network: Network) -> None:
    """Two groups of two hosts each, which are four; each has the variables that its ftrun sets."""
    with lighthouse(network, "head", "ours") as address:
        env = {"FT_LIGHTHOUSE": address, "FT_TOKEN": "ours", "FT_NUM_REPLICA_GROUPS": "2", "GROUP_WORLD_SIZE": "2"}
        places = {"a": ("0", "0"), "b": ("0", "1"), "c": ("1", "0"), "d": ("1", "1")}
        hosts = {
            name: Host({**env, "FT_REPLICA_GROUP": group, "GROUP_RANK": rank, "LOCAL_RANK": "0"}, ["--no-bandwidth"])
            for name, (group, rank) in places.items()
        }
        found = examine(network, hosts, where="")
    (report,) = found.values()
    assert report.about("hosts", "OK")["text"] == "4 have come, on 4 machines"
    assert report.status == 0, report.findings
