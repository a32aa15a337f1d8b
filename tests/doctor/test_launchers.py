"""Where the hosts of a job meet, by what their launcher says."""

from __future__ import annotations

import pytest

from ft_core.doctor.cli import main
from ft_core.doctor.launchers import PORT, Place, first_node, place, superfluous
from ft_core.errors import ConfigError

FTRUN = {"FT_NUM_REPLICA_GROUPS": "3", "FT_LIGHTHOUSE": "host0:29510", "FT_REPLICA_GROUP": "1"}
TORCHRUN = {"GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "host0", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
SRUN = {"SLURM_STEP_NUM_NODES": "8", "SLURM_STEP_NODELIST": "node[03-07,9],other[1-2]", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("env", "host", "hosts"),
    [(FTRUN, "host0", 3), (TORCHRUN, "host0", 4), (SRUN, "node03", 8), ({**SRUN, **FTRUN}, "host0", 3),
     ({**TORCHRUN, **FTRUN, "GROUP_WORLD_SIZE": "1"}, "host0", 3), ({**TORCHRUN, **FTRUN}, "host0", 12)],
)  # fmt: skip
def test_each_launcher_names_the_first_host_and_how_many_there_are(env: dict[str, str], host: str, hosts: int) -> None:
    found = place(None, None, env)
    assert found is not None
    assert (found.host, found.port, found.hosts) == (host, PORT, hosts)
    assert found.by


@pytest.mark.parametrize(
    "env",
    [{}, {**FTRUN, "FT_NUM_REPLICA_GROUPS": "1"}, {**FTRUN, "FT_LIGHTHOUSE": ""}, {**TORCHRUN, "GROUP_WORLD_SIZE": "1"},
     {**TORCHRUN, "GROUP_WORLD_SIZE": "some"}, {"SLURM_STEP_NUM_NODES": "2"}],
)  # fmt: skip
def test_one_host_stays_alone(env: dict[str, str]) -> None:
    assert place(None, None, env) is None


def test_what_is_said_on_the_command_line_counts() -> None:
    assert place("h", 2, {}) == Place("h", PORT, 2, "--meet")
    assert place("h:7", 2, FTRUN) == Place("h", 7, 2, "--meet")
    assert place("h:7", None, FTRUN) == Place("h", 7, 3, "--meet")
    found = place(None, 2, FTRUN)
    assert found is not None
    assert found.hosts == 2


@pytest.mark.parametrize(
    ("meet", "hosts", "says"),
    [
        ("h", None, "needs --hosts N"),
        (None, 2, "needs --meet HOST:PORT"),
        (":5", 2, "--meet"),
        ("h:99999", 2, "--meet"),
    ],
)
def test_what_does_not_fit_together(meet: str | None, hosts: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place(meet, hosts, {})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node7", "node7"), ("node[03-07,9],other", "node03"), ("a1,a2", "a1"), ("rack[2]-n", "rack2-n"), ("n[1,5]", "n1"),
     ("gpu-a[001-128]", "gpu-a001")],
)  # fmt: skip
def test_slurms_lists(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_the_first_process_of_a_host_or_group_does_it() -> None:
    assert superfluous({}) == superfluous(FTRUN) == superfluous({"LOCAL_RANK": "0"}) == ""
    assert "LOCAL_RANK=1" in superfluous({"LOCAL_RANK": "1"})
    assert "SLURM_LOCALID=3" in superfluous({"SLURM_LOCALID": "3"})
    assert superfluous({"SLURM_LOCALID": "3", "LOCAL_RANK": "0"}) == "", "a group of its own under srun"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--wait", "0"], "--wait 0 must be more than 0"),
        (["--wait", "nan"], "--wait nan must be more than 0"),
        (["--alone", "--hosts", "2"], "--alone and --meet exclude each other"),
        (["--meet", "127.0.0.1", "--hosts", "0"], "--hosts 0 must be between 1 and"),
        (["--meet", "127.0.0.1:1", "--hosts", "2"], ""),
        (["--events", "/nowhere"], "--events /nowhere"),
    ],
)
def test_wrong_usage(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    if says:
        assert main(options) == 2
        assert says in capsys.readouterr().err
