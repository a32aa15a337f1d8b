"""Real leases with a real lighthouse, in one process."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import socket
import time
from typing import TYPE_CHECKING

import pytest

from ft_core.control.lighthouse.lease_client import LeaseClient, LeaseSettings
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import ConfigError, JobFinishedError, LighthouseError, ProtocolError, RefusedError
from ft_core.lighthouse import main
from ft_core.protocol.lighthouse.events import Hello
from ft_core.protocol.types import Version
from ft_core.rpc.channel import LIGHTHOUSE, grpc, open_channel
from ft_core.rpc.codec import pb
from tests import threads
from tests.control.recorder import BUDGET, Recorder, Replica, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.held_ports import Hold


def port_of(server: LighthouseServer) -> int:
    return int(server.address().rpartition(":")[2])


def converse(channel: grpc.Channel, first: bytes) -> list[bytes]:
    """What the lighthouse says to a lease that begins (and ends) with this."""
    method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{LIGHTHOUSE}/Lease")
    return list(method(iter([first])))


@pytest.mark.parametrize("names", [["a:1"], ["b:1", "a:1"], ["c:1", "a:1", "b:1"]])
def test_a_quorum_of_all_who_ask(replica: Callable[..., Replica], names: list[str]) -> None:
    replicas = [replica(name) for name in names]
    for one in replicas:
        one.lease.wait_connected(5)
    for one in replicas:
        one.ask(store_address=f"{one.replica_id}-store")
    quorums = [one.answer() for one in replicas]
    assert all(quorum == quorums[0] for quorum in quorums)
    assert quorums[0].ids == tuple(sorted(names))
    assert quorums[0].members[0].store_address == f"{sorted(names)[0]}-store"
    assert abs(quorums[0].created_ms / 1000 - time.time()) < 60


def test_acknowledgements_keep_coming(replica: Callable[..., Replica]) -> None:
    one = replica("a:1")
    one.lease.wait_connected(5)
    first = one.lease.last_ack
    assert first <= time.monotonic()
    wait_until(lambda: one.lease.last_ack > first)


def test_a_newcomer_makes_a_change_pending(trio: list[Replica], replica: Callable[..., Replica]) -> None:
    old = trio[0].answer()
    newcomer = replica("d:1")
    newcomer.lease.wait_connected(5)
    newcomer.ask()
    for one in trio:
        quorum_id, reason = one.recorder.wait("change_pending")
        assert quorum_id == old.quorum_id
        assert "d:1 wants to join" in reason
    assert "running groups" in newcomer.recorder.wait("reason")[0]
    for one in trio:
        one.ask(step=5)
    new = newcomer.answer()
    assert new.ids == ("a:1", "b:1", "c:1", "d:1")
    assert new.quorum_id > old.quorum_id
    assert new.members[0].previous_quorum_id == old.quorum_id


def test_a_newcomer_is_told_whom_to_heal_from(replica: Callable[..., Replica]) -> None:
    one = replica("a:1", heal_addresses=("http://a:1",))
    one.lease.wait_connected(5)
    one.ask()
    one.answer()
    newcomer = replica("b:1")
    assert newcomer.recorder.wait("welcome")[0] == (("a:1", ("http://a:1",)),)


def test_a_closed_lease_is_a_death_after_the_grace(trio: list[Replica]) -> None:
    quorum = trio[0].answer()
    closed = time.monotonic()
    trio[2].close()
    for one in trio[:2]:
        assert one.recorder.wait("member_lost") == (quorum.quorum_id, ("c:1",))
    assert 0.08 < time.monotonic() - closed < 1.0
    for one in trio[:2]:
        one.ask(step=3, failed=True)
    assert trio[0].answer().ids == ("a:1", "b:1")


def test_with_a_failed_collective_as_second_witness_death_is_at_once(trio: list[Replica]) -> None:
    trio[2].close()
    for one in trio[:2]:
        one.ask(step=3, failed=True)
    assert trio[0].answer().ids == ("a:1", "b:1")
    assert trio[1].answer().ids == ("a:1", "b:1")


def test_leaving_takes_effect_at_once_and_is_no_loss_if_agreed(trio: list[Replica]) -> None:
    trio[0].ask(step=1)
    trio[1].ask(step=1)
    assert trio[2].lease.leave("done here", finished=False, version=Version(1, 1), agreed=True, timeout_s=5)
    assert trio[0].answer().ids == ("a:1", "b:1")
    assert trio[1].recorder.of("member_lost") == []
    assert not trio[2].lease.connected
    trio[2].ask(step=1)
    trio[2].recorder.wait("reason", lambda text: "running groups" in text)


def test_a_finished_job_stays_finished_until_reopened(trio: list[Replica], replica: Callable[..., Replica]) -> None:
    for one in trio:
        assert one.lease.leave("finished", finished=True, version=Version(9, 1), agreed=True, timeout_s=5)
    late = replica("d:1")
    error = late.recorder.wait("refused")[0]
    assert isinstance(error, JobFinishedError)
    assert "finished at step 9" in str(error)
    with pytest.raises(JobFinishedError):
        late.ask()
    with pytest.raises(JobFinishedError):
        late.lease.wait_connected(1)


def test_a_pause_reaches_the_others(trio: list[Replica]) -> None:
    quorum = trio[0].answer()
    trio[1].lease.progress(1, "saving", Version(0, 0), paused_s=30.0)
    for one in (trio[0], trio[2]):
        quorum_id, who, for_s = one.recorder.wait("paused")
        assert (quorum_id, who) == (quorum.quorum_id, "b:1")
        assert 25 < for_s <= 30
    trio[1].lease.progress(1, "step", Version(0, 0))
    trio[0].recorder.wait("paused", lambda _id, _who, for_s: for_s == 0)
    assert trio[1].recorder.of("paused") == []


def test_the_first_state_that_must_not_be_forgotten_is_reported_at_once(
    lighthouse: LighthouseServer, trio: list[Replica]
) -> None:
    """A connection that closes before the next renewal would otherwise take all knowledge of it along."""
    quorum_id = trio[0].answer().quorum_id
    lease = trio[1].lease
    lease._renew_s = 3600.0
    wait_until(lambda: lease._outgoing is not None and lease._outgoing.renew_at > time.monotonic() + 60)
    records = lighthouse._rooms.room("default").room.records  # looked at only
    lease.progress(1, "step", Version(0, 0))
    lease.progress(2, "step", Version(1, quorum_id))
    wait_until(lambda: records["b:1"].stable == Version(1, quorum_id))


def test_refusals_name_what_is_wrong(trio: list[Replica], replica: Callable[..., Replica]) -> None:
    twin = replica("a:1")
    error = twin.recorder.wait("refused")[0]
    assert isinstance(error, RefusedError)
    assert "two live processes call themselves 'a:1'" in str(error)
    with pytest.raises(RefusedError):
        twin.lease.wait_connected(1)
    trio[0].ask(step=1)  # the first of that name is not disturbed
    trio[1].ask(step=1)
    trio[2].ask(step=1)
    assert len(trio[0].answer().ids) == 3


def test_another_model_is_refused_with_the_first_difference(replica: Callable[..., Replica]) -> None:
    one = replica("a:1", signature=1, signature_lines=("w float32 [3]", "b float32 [3]"))
    one.lease.wait_connected(5)
    other = replica("b:1", signature=2, signature_lines=("w float32 [3]", "b float32 [4]"))
    text = str(other.recorder.wait("refused")[0])
    assert "parameter 1 is 'b float32 [4]' here and 'b float32 [3]' there" in text


def test_a_token_is_asked_for_and_compared() -> None:
    server = LighthouseServer("127.0.0.1:0", token="secret")
    try:
        for token, words in (("", "needs a token: set FT_TOKEN"), ("other", "FT_TOKEN differs")):
            one = Replica(server.address(), "a:1", token=token)
            with pytest.raises(RefusedError, match=words):
                one.lease.wait_connected(5)
            one.recorder.wait("refused")
            one.close()
        good = Replica(server.address(), "a:1", token="secret")
        good.lease.wait_connected(5)
        good.close()
    finally:
        server.shutdown()


def test_a_token_that_nobody_asks_for_is_noticed_once(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a:1", "b:1"):
        replica(name, token="secret").lease.wait_connected(5)
    (line,) = [text for text in caplog.messages if "sent a token" in text]
    assert "127.0.0.1" in line
    assert "the lighthouse has none (FT_TOKEN): anybody may connect" in line


def test_a_clean_end_is_no_news(
    trio: list[Replica], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ft_core")
    trio[1].ask(room="other")
    trio[1].answer()
    for one in (trio[0], trio[2]):
        with monkeypatch.context() as patch:  # `leave` wakes up late: the stream has ended before
            patch.setattr(one.lease._changed, "notify_all", lambda: None)
            assert one.lease.leave("done", finished=False, version=Version(1, 1), agreed=True, timeout_s=0.5)
        assert len(one.recorder.of("hello")) == 1, "the lease is not opened again"
    assert not [text for text in caplog.messages if "cannot be reached" in text]


def test_a_differing_protocol_version_is_refused(lighthouse: LighthouseServer) -> None:
    channel = open_channel(lighthouse.address(), "addr", None)
    hello = pb.LeaseRequest(hello=pb.Hello(protocol_version=99, release="9.9", room="default", replica_id="x"))
    pushes = converse(channel, hello.SerializeToString())
    channel.close()
    refused = pb.Push.FromString(pushes[0]).refused
    assert refused.kind == pb.Refused.Kind.PROTOCOL
    assert "version 99" in refused.reason
    assert "upgrade ft-training on the lighthouse" in refused.reason


def test_garbage_disturbs_nobody(trio: list[Replica], lighthouse: LighthouseServer) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 3000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500):
        with socket.create_connection(("127.0.0.1", port_of(lighthouse)), 5) as connection:
            connection.sendall(garbage)
            connection.settimeout(5)
            try:
                while connection.recv(4096):
                    pass
            except OSError:
                pass
    channel = open_channel(lighthouse.address(), "addr", None)
    pushes = converse(channel, b"\xff\xff\xff")
    assert pb.Push.FromString(pushes[0]).refused.kind == pb.Refused.Kind.PROTOCOL
    unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{LIGHTHOUSE}/Quorum")
    with pytest.raises(grpc.RpcError, match="not a QuorumRequest"):
        unary(b"\xff\xff\xff", timeout=5)
    channel.close()
    for one in trio:
        assert len(one.recorder.of("hello")) == 1
        one.ask(step=1)
    assert len(trio[0].answer().ids) == 3


def test_rooms_do_not_meet_and_asking_in_another_leaves_the_first(trio: list[Replica]) -> None:
    old = trio[0].answer()
    trio[2].ask(room="other")
    moved = trio[2].answer()
    assert moved.ids == ("c:1",)
    assert trio[0].recorder.wait("member_lost") == (old.quorum_id, ("c:1",))
    assert moved.quorum_id > old.quorum_id
    trio[2].ask(room="other")
    assert trio[2].answer().ids == ("c:1",)


def test_each_reason_is_told_and_logged_once(replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ft_core.lighthouse")
    one = replica("a:1")
    one.lease.wait_connected(5)
    one.ask(min_replicas=3)
    words = "1 of the 3 groups that min_replicas asks for"
    one.recorder.wait("reason", lambda text: words in text)
    two = replica("b:1")
    two.lease.wait_connected(5)
    two.ask(min_replicas=3)
    for each in (one, two):
        each.recorder.wait("reason", lambda text: "2 of the 3 groups" in text)
    assert len([text for (text,) in one.recorder.of("reason") if words in text]) == 1
    assert len([line for line in caplog.messages if words in line]) == 1
    assert "2 of the 3 groups" in one.lease.last_reason


def test_an_ask_is_presented_again_until_answered(lighthouse: LighthouseServer) -> None:
    port = port_of(lighthouse)
    one = Replica(lighthouse.address(), "a:1")
    one.lease.wait_connected(5)
    lighthouse.shutdown()
    one.ask()
    again = LighthouseServer(f"127.0.0.1:{port}", boot_window_ms=20, token="")
    try:
        assert one.answer().ids == ("a:1",)
    finally:
        one.close()
        again.shutdown()


def test_a_restarted_lighthouse_adopts_the_running_quorum(trio: list[Replica], lighthouse: LighthouseServer) -> None:
    old = trio[0].answer()
    lighthouse.shutdown()
    wait_until(lambda: not any(one.lease.connected for one in trio))
    assert "cannot be reached" in trio[0].lease.last_reason
    back = time.monotonic()
    again = LighthouseServer(f"127.0.0.1:{port_of(lighthouse)}", token="")
    listening = time.monotonic()
    newcomer = Replica(again.address(), "d:1")
    try:
        wait_until(lambda: all(one.lease.connected for one in trio))
        assert time.monotonic() - listening < 0.5
        newcomer.lease.wait_connected(5)
        newcomer.ask()
        for one in trio:
            assert one.recorder.wait("change_pending")[0] == old.quorum_id
            one.ask(step=4)
        new = newcomer.answer()
        assert new.ids == ("a:1", "b:1", "c:1", "d:1")
        assert new.quorum_id > old.quorum_id
        assert time.monotonic() - back < 1.5
        for one in trio:
            assert one.recorder.of("member_lost") == []
            assert one.recorder.of("superseded") == []
    finally:
        for one in (newcomer, *trio):
            one.close()
        again.shutdown()


def test_nobody_there_names_the_setting_and_what_to_do(nobody: str) -> None:
    one = Replica(nobody, "a:1")
    with pytest.raises(LighthouseError, match=r"FT_LIGHTHOUSE.*127\.0\.0\.1.*refused.*check the address"):
        one.lease.wait_connected(0.3)
    assert "not connected" in repr(one.lease)
    one.close()


def test_an_address_that_stays_silent_is_a_warning_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture, hold: Hold
) -> None:
    (port,) = hold()
    one = Replica(f"127.0.0.1:{port}", "a:1")
    with pytest.raises(LighthouseError):
        one.lease.wait_connected(0.3)
    assert not caplog.records, "for a moment it is no warning: trainers and lighthouse start together"
    wait_until(lambda: bool(caplog.records))
    server = LighthouseServer(f"127.0.0.1:{port}", token="")
    try:
        one.lease.wait_connected(5)
        wait_until(lambda: len(caplog.records) > 1)
    finally:
        one.close()
        server.shutdown()
    warned, back = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "cannot be reached" in warned
    assert "(lighthouse_addr (FT_LIGHTHOUSE)); trying again" in warned
    assert "a:1: the lighthouse answers after" in back


def test_a_wrong_address_form_is_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="lighthouse_addr"):
        LeaseClient(LeaseSettings("nowhere", "a:1", BUDGET), Recorder(Hello("a:1", "a", 0, 0)))


def test_something_else_at_the_address_is_a_protocol_error(lighthouse: LighthouseServer) -> None:
    other = Replica(lighthouse.address(), "a:1", start=False)
    other.lease._method = "/some.other.Service/Call"
    other.lease.start()
    with pytest.raises(ProtocolError, match="not the lighthouse"):
        other.lease.wait_connected(5)
    other.close()


def test_a_failing_handler_does_not_end_the_lease(replica: Callable[..., Replica]) -> None:
    one = replica("a:1", start=False)

    def broken(_: object) -> None:
        one.recorder.note("broken")
        if len(one.recorder.of("broken")) == 1:
            raise RuntimeError("a bug in a handler")

    one.recorder.on_push = broken  # type: ignore[method-assign, assignment]
    one.lease.start()
    one.recorder.wait("broken", lambda: len(one.recorder.of("broken")) >= 2)


def test_shutdown_leaves_nothing_behind() -> None:
    before = threads.alive()
    server = LighthouseServer("127.0.0.1:0", token="")
    port = port_of(server)
    one = Replica(server.address(), "a:1")
    one.lease.wait_connected(5)
    began = time.monotonic()
    server.shutdown()
    server.shutdown()
    one.close()
    one.close()
    assert time.monotonic() - began < 3
    threads.wait_for_end(before, "shutdown")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 1)
    fresh = LighthouseServer(f"127.0.0.1:{port}", token="")
    fresh.shutdown()


def test_a_port_in_use_is_a_config_error(lighthouse: LighthouseServer) -> None:
    port = port_of(lighthouse)
    with pytest.raises(ConfigError, match=rf"bind=.*port {port} is in use by another process; stop that one, or"):
        LighthouseServer(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        (["--join-timeout-ms", "-5"], "2", "--join-timeout-ms -5 must be a number of milliseconds, 0 or more"),
        (["--min-replicas", "0"], "2", "--min-replicas 0 must be at least 1"),
        ([], "0", "FT_MIN_REPLICAS='0' must be a whole number from 1 to"),
        (["--grace-ms", "90", "--liveness-ms", "50"], "2", "--grace-ms 90 must not be above --liveness-ms 50"),
        (["--bind", "nonsense"], "2", "--bind 'nonsense': expected host:port"),
    ],
)
def test_the_command_line_names_what_the_user_wrote(
    options: list[str],
    environment: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(
        "ft_core.control.lighthouse.cli._log_to_stderr", lambda: logging.handlers.QueueListener(queue.Queue())
    )
    monkeypatch.setattr("logging.handlers.QueueListener.stop", lambda _: None)
    monkeypatch.setenv("FT_MIN_REPLICAS", environment)
    assert main(options) == 2
    assert f"ft-lighthouse: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"bind": "nonsense"}, "bind"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"join_timeout_ms": -5}, "join_timeout_ms=-5 must be a number of milliseconds"),
        ({"liveness_ms": 0}, "liveness_ms"),
        ({"grace_ms": 5000}, "grace_ms=5000 must not be above liveness_ms=1000"),
        (
            {"bind": "nosuchhost.invalid:2000", "token": "secret"},
            "'nosuchhost.invalid' cannot be resolved .*use an address of this",
        ),
        ({"bind": "192.0.2.1:2000", "token": "secret"}, r"192\.0\.2\.1 is not an address of this machine; use"),
        ({"token": "two\nlines"}, "FT_TOKEN"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        LighthouseServer(**arguments)  # type: ignore[arg-type]


def test_reprs_sum_up(trio: list[Replica], lighthouse: LighthouseServer) -> None:
    assert repr(trio[0].lease) == f"LeaseClient(a:1 -> {lighthouse.address()}, connected)"
    assert "rooms=1, leases=3" in repr(lighthouse)


def test_another_model_is_also_refused_when_it_asks(replica: Callable[..., Replica]) -> None:
    one, other = replica("a:1"), replica("b:1")
    for each in (one, other):
        each.lease.wait_connected(5)
    one.ask(signature=1, signature_lines=("w float32 [3]",))
    one.answer()
    other.ask(signature=2, signature_lines=("w float32 [4]",))
    error = other.recorder.wait("refused")[0]
    assert isinstance(error, RefusedError)
    assert "'w float32 [4]' here and 'w float32 [3]' there" in str(error)
