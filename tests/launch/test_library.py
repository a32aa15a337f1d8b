"""The agent as a library: what `run` returns and raises, as on the page of torch's elastic agent."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from ft_core import launch
from ft_core.errors import ConfigError, UsageError
from ft_core.launch import GroupAgent, WorkerGroupFailureException
from tests.launch import calls

if TYPE_CHECKING:
    import pathlib

pytestmark = [pytest.mark.process]


@pytest.fixture(autouse=True)
def outside_of_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FT_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE", "FT_NUM_REPLICA_GROUPS"):
        monkeypatch.delenv(name, raising=False)


def failure_of(agent: GroupAgent) -> dict[int, Exception]:
    with pytest.raises(WorkerGroupFailureException) as raised:
        agent.run()
    return raised.value.get_worker_exceptions()


def test_what_the_workers_return_by_rank() -> None:
    agent = GroupAgent(calls.rank_and_more, ("hi",), nproc=2)
    assert agent.run() == {0: ("hi", 0, "replica-0"), 1: ("hi", 1, "replica-0")}
    group = agent.get_worker_group()
    assert (group.state.name, len(group.workers)) == ("SUCCEEDED", 2)
    with pytest.raises(UsageError, match="has run already"):
        agent.run()


def test_a_function_that_returns_nothing() -> None:
    assert GroupAgent(calls.nothing).run("trainer") == {0: None}


def test_a_script(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nopen(sys.argv[1], 'w').write(sys.argv[2])\n")
    assert GroupAgent(str(script), (tmp_path / "said", 5)).run() == {0: None}
    assert (tmp_path / "said").read_text() == "5"


def test_what_a_worker_raised() -> None:
    (error,) = failure_of(GroupAgent(calls.fails, (0,), max_restarts=0)).values()
    assert isinstance(error, KeyError)
    assert error.args == ("lost",)


def test_only_the_rank_that_failed_is_named() -> None:
    assert list(failure_of(GroupAgent(calls.fails, (1,), nproc=2, max_restarts=0))) == [1]


def test_a_worker_that_could_not_tell() -> None:
    assert "exited with code 7" in str(failure_of(GroupAgent(calls.dies, max_restarts=0))[0])
    unsent = failure_of(GroupAgent(calls.fails_with_what_cannot_be_sent, max_restarts=0))[0]
    assert str(unsent) == "Unsendable: secret (not sent: no)"


def test_the_group_is_started_again(tmp_path: pathlib.Path) -> None:
    assert GroupAgent(calls.succeeds_the_second_time, (str(tmp_path),)).run() == {0: "again"}


def test_on_another_thread() -> None:
    results: list[dict[int, Any]] = []
    agent = GroupAgent(calls.nothing)
    with pytest.raises(UsageError, match="get_worker_group before"):
        agent.get_worker_group()
    thread = threading.Thread(target=lambda: results.append(agent.run()))
    thread.start()
    thread.join(30)
    assert results == [{0: None}]


def test_what_cannot_work(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"entrypoint=.*cannot be sent to another process"):
        GroupAgent(lambda: None)
    with pytest.raises(ConfigError, match=r"num_replicas=3: .*common lighthouse"):
        GroupAgent(calls.nothing, num_replicas=3)
    with pytest.raises(ConfigError, match="cannot read the script"):
        GroupAgent(str(tmp_path / "none.py")).run()
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = launch.Nothing
