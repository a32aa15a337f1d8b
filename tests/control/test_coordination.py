"""The public names, used as their documentation says."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ft_core.coordination import LighthouseClient, LighthouseServer, ManagerClient, ManagerServer, Quorum, QuorumMember
from ft_core.errors import ConfigError, LighthouseError, QuorumTimeoutError, RefusedError, UsageError
from tests.control.recorder import Replica, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.held_ports import Hold


SOON = timedelta(seconds=5)


@pytest.fixture
def client(lighthouse: LighthouseServer) -> Iterator[LighthouseClient]:
    one = LighthouseClient(lighthouse.address(), SOON)
    yield one
    one.close()


def test_a_quorum_without_leases() -> None:
    server = LighthouseServer("127.0.0.1:0", 1, 4000, boot_window_ms=0, token="")
    client = LighthouseClient(server.address(), SOON)

    def ask(name: str, step: int) -> Quorum:
        return client.quorum(name, SOON, f"{name}-a", f"{name}-s", step=step, world_size=2, data="d")

    client.heartbeat("b")  # known to live, so a quorum waits for it
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(ask, ["a", "b"], [3, 4])
    assert first == second
    assert first.participants == [
        QuorumMember("a", "a-a", "a-s", 3, 2, False, "d"),
        QuorumMember("b", "b-a", "b-s", 4, 2, False, "d"),
    ]
    client.close()
    server.shutdown()


def test_the_id_stays_while_the_members_do(client: LighthouseClient) -> None:
    first = client.quorum("a", SOON)
    assert client.quorum("a", SOON, step=1).quorum_id == first.quorum_id
    with ThreadPoolExecutor(1) as threads:
        newcomer = threads.submit(client.quorum, "b", SOON)
        step = 1
        while len((quorum := client.quorum("a", SOON, step=(step := step + 1))).participants) == 1:
            assert quorum.quorum_id == first.quorum_id
        assert newcomer.result() == quorum
    assert quorum.quorum_id > first.quorum_id


def test_no_quorum_in_time_says_why() -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, boot_window_ms=0, token="")
    client = LighthouseClient(server.address(), SOON)
    with pytest.raises(QuorumTimeoutError, match=r"a within 0\.3 s: 1 of the 2 groups"):
        client.quorum("a", timedelta(seconds=0.3))
    client.heartbeat("b")
    with ThreadPoolExecutor(2) as threads:
        assert len({q.quorum_id for q in threads.map(lambda name: client.quorum(name, SOON), ["a", "b"])}) == 1
    client.close()
    server.shutdown()
    with pytest.raises(UsageError):
        client.heartbeat("a")


def test_a_client_that_calls_no_more_has_left() -> None:
    server = LighthouseServer("127.0.0.1:0", boot_window_ms=0, heartbeat_timeout_ms=300, token="")
    client = LighthouseClient(server.address(), SOON)
    client.heartbeat("a")
    client.quorum("b", SOON)

    def lives() -> list[str]:
        return [r.life for r in client.status().rooms[0].replicas]

    assert lives() == ["up", "up"]
    wait_until(lambda: lives() == ["gone", "gone"])
    client.heartbeat("a")
    assert lives() == ["up", "gone"]
    client.close()
    server.shutdown()


def test_waiting_for_a_quorum_is_no_silence() -> None:
    """Found by reading: whoever had waited for longer than the heartbeat timeout was gone once it was answered."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, boot_window_ms=0, heartbeat_timeout_ms=1000, token="")
    client = LighthouseClient(server.address(), SOON)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(client.quorum, "a", SOON)
        wait_until(lambda: [r.since_ms > 1200 for room in client.status().rooms for r in room.replicas] == [True])
        assert client.quorum("b", SOON) == waits.result()
    client.heartbeat("c")  # the lighthouse looks at everybody
    assert [r.life for r in client.status().rooms[0].replicas] == ["up", "up", "up"]
    client.close()
    server.shutdown()


def test_a_refused_ask_ends_its_call_at_once(client: LighthouseClient) -> None:
    """Found by reading: only leases were sent their refusal, a call waited until its timeout."""
    client.quorum("a", SOON, world_size=2)
    with pytest.raises(RefusedError, match="the replica group b has 1 rank, but a has 2"):
        client.quorum("b", SOON, world_size=1)
    assert [m.replica_id for m in client.quorum("a", SOON, world_size=2).participants] == ["a"]


def test_status_and_a_supervisors_word(client: LighthouseClient, lighthouse: LighthouseServer) -> None:
    one, two = Replica(lighthouse.address(), "a:1", expected=2), Replica(lighthouse.address(), "b:1", expected=2)
    for each in (one, two):
        each.lease.wait_connected(5)
        each.ask()
    quorum = one.answer()
    two.answer()
    room = client.status().rooms[0]
    assert (room.room, room.quorum_id, list(room.members)) == ("default", quorum.quorum_id, ["a:1", "b:1"])
    assert [(r.replica_id, r.life, r.member) for r in room.replicas] == [("a:1", "up", True), ("b:1", "up", True)]
    assert client.report_ended("b:1")
    assert one.recorder.wait("member_lost") == (quorum.quorum_id, ("b:1",))
    assert not client.report_ended("nobody")
    one.close()
    two.close()


def test_status_names_who_is_stalled(client: LighthouseClient, lighthouse: LighthouseServer) -> None:
    one, two = (Replica(lighthouse.address(), name, expected=2) for name in ("a:1", "b:1"))
    for each in (one, two):
        each.lease.wait_connected(5)
        each.ask()
    one.answer()
    two.answer()
    assert [r.committed for r in client.status().rooms[0].replicas] == [False, False]
    one.ask(step=1, failed=True, min_replicas=2)  # a step was committed; it may not go on alone
    wait_until(lambda: any(r.stalled for r in client.status().rooms[0].replicas))
    replicas = {r.replica_id: r for r in client.status().rooms[0].replicas}
    assert replicas["b:1"].stalled == "b:1 is alive but did not arrive within 2 s (alive)"
    assert replicas["b:1"].committed
    assert replicas["a:1"].stalled == ""
    two.ask(step=1)
    two.answer()
    assert [r.stalled for r in client.status().rooms[0].replicas] == ["", ""]
    one.close()
    two.close()


def test_a_supervisors_word_that_overtakes_the_end_of_the_lease(
    client: LighthouseClient, lighthouse: LighthouseServer
) -> None:
    one, two = (Replica(lighthouse.address(), name, expected=2) for name in ("a:1", "b:1"))
    for each in (one, two):
        each.lease.wait_connected(5)
        each.ask()
    quorum = one.answer()
    two.answer()
    assert client.report_ended("b")
    assert one.recorder.of("member_lost") == []
    two.close()
    assert one.recorder.wait("member_lost") == (quorum.quorum_id, ("b:1",))
    one.close()


def test_a_finished_room_is_reopened(client: LighthouseClient, lighthouse: LighthouseServer) -> None:
    one = Replica(lighthouse.address(), "a:1")
    one.lease.wait_connected(5)
    assert one.lease.leave("end", finished=True, version=one.recorder.presented.version, agreed=True, timeout_s=5)
    assert client.reopen()
    assert not client.reopen()
    late = Replica(lighthouse.address(), "b:1")
    late.lease.wait_connected(5)
    late.close()
    one.close()


def test_orders_need_a_token() -> None:
    server = LighthouseServer("127.0.0.1:0", token="secret")
    client = LighthouseClient(server.address(), SOON, token="secret")
    one = Replica(server.address(), "a:1", token="secret")
    one.lease.wait_connected(5)
    assert client.drain("a", "maintenance") == ["a:1"]
    assert one.recorder.wait("drain") == ("maintenance",)
    assert client.kill("a:1", "now") == ["a:1"]
    assert one.recorder.wait("kill") == ("now",)
    assert client.kill("b") == []
    with pytest.raises(RefusedError, match="FT_TOKEN"):
        LighthouseClient(server.address(), SOON, token="")
    one.close()
    client.close()
    server.shutdown()


def test_orders_without_a_token_are_refused(client: LighthouseClient) -> None:
    with pytest.raises(RefusedError, match="started with FT_TOKEN"):
        client.kill("a")


def test_nobody_there_and_wrong_addresses() -> None:
    with pytest.raises(LighthouseError, match=r"addr='127.0.0.1:1'.*connect_timeout=0.2 s.*refused"):
        LighthouseClient("127.0.0.1:1", timedelta(seconds=0.2))
    with pytest.raises(ConfigError, match="addr='nowhere'"):
        LighthouseClient("nowhere", SOON)


def test_a_group_through_manager_server_and_clients(lighthouse: LighthouseServer) -> None:
    server = ManagerServer("g:1", lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "store:1", 2, connect_timeout=SOON)
    ranks = [
        ManagerClient(server.address(), SOON, replica_id="g:1", group_rank=r, world_size=2, store_address=f"s{r}")
        for r in range(2)
    ]
    with ThreadPoolExecutor(2) as threads:
        for step in range(3):
            first, second = threads.map(lambda rank, step=step: rank.quorum(step, SOON), ranks)
            assert first == second
            assert first.participants[0].store_address == "s0"
            yes = list(threads.map(lambda rank, step=step: rank.should_commit(rank._rank, step, True, SOON), ranks))
            assert yes == [True, True]
        no = list(threads.map(lambda rank: rank.should_commit(rank._rank, 3, rank._rank == 0, SOON), ranks))
        assert no == [False, False]
    with pytest.raises(ConfigError, match="group_rank=1"):
        ranks[0].should_commit(1, 4, True, SOON)
    for rank in ranks:
        rank.shutdown()
    server.shutdown()
    server.shutdown()


def test_a_manager_client_needs_nothing_but_the_address(
    lighthouse: LighthouseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ManagerServer("g:1", lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "store:1", 2, connect_timeout=SOON)
    ranks = [ManagerClient(server.address(), SOON)]
    monkeypatch.setenv("RANK", "1")
    ranks.append(ManagerClient(server.address(), connect_timeout=SOON))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: rank.quorum(7, SOON, data={"n": [1]}), ranks)
        assert (
            list(threads.map(lambda pair: pair[1].should_commit(pair[0], 7, True, SOON), enumerate(ranks)))
            == [True] * 2
        )
    assert first == second
    (member,) = first.participants
    assert (member.replica_id, member.world_size, member.step, member.data) == ("g:1", 2, 7, {"n": [1]})
    for rank in ranks:
        rank.shutdown()
    server.shutdown()


def test_data_is_text_or_a_dict(client: LighthouseClient) -> None:
    for data in ({"my_data": 1234, "deep": {"a": [None, 1.5, True]}}, {}, "d", "json:{}", "text:json:", None):
        (member,) = client.quorum("a", SOON, data=data).participants
        assert member.data == data
    for wrong, why in (({1: 2}, "JSON has text as keys"), ({"a": {1, 2}}, "cannot be sent"), ({"a": (1,)}, "lists")):
        with pytest.raises(ConfigError, match=why):
            client.quorum("a", SOON, data=wrong)  # type: ignore[arg-type]


def test_a_manager_server_without_a_lighthouse_says_so() -> None:
    with pytest.raises(LighthouseError, match="lighthouse_addr"):
        ManagerServer("g:1", "127.0.0.1:1", connect_timeout=timedelta(seconds=0.3))


def test_a_client_that_gave_up_is_no_member_later(client: LighthouseClient) -> None:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, boot_window_ms=0, heartbeat_timeout_ms=60_000, token="")
    other = LighthouseClient(server.address(), SOON)
    with pytest.raises(QuorumTimeoutError):
        other.quorum("gone", timedelta(seconds=0.2))
    wait_until(lambda: [r.life for r in other.status().rooms[0].replicas] == ["gone"])
    other.close()
    server.shutdown()
    client.heartbeat("x")


def seconds_to_a_quorum(bind: str, boot_window_ms: int | None = None) -> float:
    """Until the first client of a lighthouse that has just started is in a quorum."""
    server = LighthouseServer(bind, min_replicas=1, token="", boot_window_ms=boot_window_ms)
    try:
        caller = LighthouseClient(server.address(), SOON, token="")
        began = time.monotonic()
        assert caller.quorum("a", SOON).participants
        return time.monotonic() - began
    finally:
        server.shutdown()


def test_nobody_is_waited_for_at_a_new_address() -> None:
    """The reference's own limit is 0.4 s after the last ask. The best of three: other processes run here, too."""
    assert min(seconds_to_a_quorum("127.0.0.1:0") for _ in range(3)) < 0.4
    assert seconds_to_a_quorum("127.0.0.1:0", boot_window_ms=600) > 0.5, "given, it holds"


def test_running_groups_are_waited_for_at_an_address_that_may_be_known(hold: Hold) -> None:
    assert seconds_to_a_quorum(f"127.0.0.1:{hold()[0]}") > 0.4


@pytest.mark.parametrize(
    "kind", [LighthouseClient, LighthouseServer, ManagerClient, ManagerServer, Quorum, QuorumMember]
)
def test_every_public_class_documents_its_arguments(kind: type) -> None:
    assert "Args:" in str(kind.__doc__)
