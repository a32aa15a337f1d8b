"""A real server and a real client in one process: what arrives, what is refused, what is left behind."""

import gc
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ft_core.checkpointing import Prefetched, StateServer, fetch, get_blob, offers
from ft_core.checkpointing.http import places
from ft_core.checkpointing.http import server as http_server
from ft_core.checkpointing.http.answers import Answers
from ft_core.checkpointing.http.byte_stream import TICK_S
from ft_core.checkpointing.range_sums import RangeSums
from ft_core.checkpointing.staging import Reading
from ft_core.errors import ConfigError, EncodingError, HealError, UsageError
from tests.checkpointing.conftest import MIB, Gate, assert_same_state, heal_threads, make_state

Start = Callable[..., StateServer]


def address_of(server: StateServer) -> tuple[str, int]:
    host, port = server.address.removeprefix("http://").split(":")
    return host, int(port)


def eventually(check: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if check():
            return True
        threading.Event().wait(0.005)
    return False


# -- what arrives, and where


def test_into_fresh_memory(donor: Start) -> None:
    state = make_state()
    server = donor()
    server.offer("t", state)
    result = fetch([server.address], "t")
    assert_same_state(result.state, state)
    assert result.bytes == result.total_bytes == 24 * MIB + 12_345 + 280_000 + 50 * 400
    assert result.donors_used == (server.address,)


def test_in_place_where_it_matches(donor: Start) -> None:
    state, own = make_state(1), make_state(2)
    own["medium"] = own["medium"].double()  # another dtype: not in place
    own["small"]["p0"] = torch.empty(200)[::2]  # not contiguous
    own["big"].requires_grad = False
    version = own["big"]._version
    server = donor()
    server.offer("t", state)
    result = fetch([server.address], "t", into=own).state
    assert_same_state(result, state)
    assert result["big"] is own["big"]
    assert result["small"]["p1"] is own["small"]["p1"]
    assert result["medium"] is not own["medium"]
    assert result["small"]["p0"] is not own["small"]["p0"]
    assert own["big"]._version > version


def test_tensors_tied_here_but_not_there_are_not_written_twice(donor: Start) -> None:
    shared = torch.zeros(MIB)
    own = {"a": shared, "b": shared, "c": shared[10:]}
    state = {"a": torch.ones(MIB), "b": torch.full((MIB,), 2.0), "c": torch.full((MIB - 10,), 3.0)}
    server = donor()
    server.offer("t", state)
    result = fetch([server.address], "t", into=own).state
    assert all(torch.equal(result[k], state[k]) for k in state)
    assert result["a"] is shared


def test_only_some_leaves(donor: Start) -> None:
    state, own = make_state(1), make_state(2)
    kept = own["big"].clone()
    server = donor()
    server.offer("t", state)
    result = fetch([server.address], "t", into=own, only=lambda path: "big" not in path)
    assert torch.equal(result.state["big"], kept)
    assert torch.equal(result.state["medium"], state["medium"])
    assert result.bytes < MIB
    with pytest.raises(HealError, match=r"state\['big'\]"):
        fetch([server.address], "t", only=lambda path: "big" not in path)


@pytest.mark.parametrize("state", [None, 5, {}, torch.empty(0), torch.tensor(3.0), [torch.empty(0, 3)]])
def test_tiny_states(donor: Start, state: Any) -> None:
    server = donor()
    server.offer("t", {"x": state})
    assert str(fetch([server.address], "t").state["x"]) == str(state)


def test_small_and_named_storages_are_copied_at_the_offer_large_ones_are_not(donor: Start) -> None:
    state = {"live": torch.zeros(MIB), "buffer": torch.zeros(MIB), "small": torch.zeros(10)}
    server = donor()
    server.offer("t", state, copy_storages={state["buffer"].untyped_storage().data_ptr()})
    for tensor in state.values():
        tensor.add_(1)
    sums = {k: float(v.sum()) for k, v in fetch([server.address], "t").state.items()}
    assert sums == {"live": MIB, "buffer": 0, "small": 0}


def test_offer_refuses_what_cannot_be_sent(donor: Start) -> None:
    with pytest.raises(EncodingError, match=r"state\['x'\]"):
        donor().offer("t", {"x": object()})


def test_two_donors_share_the_work(donor: Start) -> None:
    servers = [donor(), donor()]
    state = make_state(mib=64)
    for server in servers:
        server.offer("t", state)
    result = fetch([s.address for s in servers], "t")
    assert_same_state(result.state, state)
    assert set(result.donors_used) == {s.address for s in servers}


def test_fetch_waits_for_the_offer(donor: Start, pool: Any) -> None:
    server = donor()
    future = pool.submit(fetch, [server.address], "t")
    assert eventually(lambda: bool(server._places.parked))
    server.offer("other", {"x": 0})
    server.offer("t", {"x": 1})
    assert future.result(10).state == {"x": 1}


# -- closing


def test_nothing_of_a_closed_offer_is_accepted(donor: Start, pool: Any, gate: Gate) -> None:
    state, own = make_state(1), make_state(1)
    server = donor()
    server.offer("t", state)
    future = pool.submit(fetch, [server.address], "t", into=own)
    assert gate.reached.wait(10)
    began = time.perf_counter()
    server.close("t")
    assert time.perf_counter() - began < 2.0, "the receiver reads on after this only"
    state["big"].fill_(0)  # the optimizer step
    gate.resume.set()
    with pytest.raises(HealError, match=re.escape(server.address) + ".*the donor went on to its next step"):
        future.result(10)


def test_the_other_donor_finishes_what_a_closed_one_left(donor: Start, pool: Any, gate: Gate) -> None:
    first, second = make_state(1), make_state(1)
    servers = [donor(), donor()]
    servers[0].offer("t", first)
    future = pool.submit(fetch, [s.address for s in servers], "t")
    assert gate.reached.wait(10)
    servers[0].close("t")
    first["big"].fill_(0)
    gate.resume.set()
    servers[1].offer("t", second)
    result = future.result(10)
    assert_same_state(result.state, second)


def test_a_fetch_that_failed_can_be_continued(donor: Start, pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(1)
    server = donor()
    original, served = Answers._range, []

    def limited(self: Answers, stream: Any, offer: Any, index: int) -> None:
        served.append(index)
        if len(served) == 4:
            server.close(offer.tag)
        original(self, stream, offer, index)

    monkeypatch.setattr(Answers, "_range", limited)
    server.offer("t", state)
    have = Prefetched()
    with pytest.raises(HealError):
        fetch([server.address], "t", have=have)
    assert have.sums
    state["medium"].add_(1)
    server.offer("t2", state)
    result = fetch([server.address], "t2", have=have)
    assert_same_state(result.state, state)
    assert result.bytes < result.total_bytes
    assert len(result.state["big"]) == 24 * MIB + 12_345


def test_close_does_not_wait_for_a_receiver_that_does_not_read(donor: Start) -> None:
    server = donor()
    server.offer("t", {"x": torch.zeros(64 * MIB, dtype=torch.uint8)})
    with socket.create_connection(address_of(server)) as sock:
        for index in range(16):
            sock.sendall(f"GET /state/t/range/{index} HTTP/1.1\r\n\r\n".encode())
        sock.recv(1)
        began = time.perf_counter()
        server.close("t")
        assert time.perf_counter() - began < 0.5 * TICK_S, "a send to who does not read ends at the end of a tick"
        assert eventually(lambda: "ft-heal-conn" not in heal_threads())


def test_several_tags_and_their_bound(donor: Start) -> None:
    server = donor()
    held = torch.zeros(MIB)
    server.offer("t0", {"x": held})
    alive = weakref.ref(server.book._offers["t0"])
    for i in range(1, 1 + offers.OFFERS_MAX):
        server.offer(f"t{i}", {"x": i})
    assert server.open_tags() == ["t1", "t2", "t3", "t4"]
    assert fetch([server.address], "t2").state == {"x": 2}
    with pytest.raises(HealError, match="'t0' was closed"):
        fetch([server.address], "t0")
    gc.collect()
    assert alive() is None
    server.close_all()
    assert server.open_tags() == []
    server.offer("t1", {"x": "again"})
    assert fetch([server.address], "t1").state == {"x": "again"}
    with pytest.raises(ConfigError, match="live-"):
        server.offer("live-1", {})


# -- failures


@pytest.mark.parametrize("always", [False, True])
def test_a_flipped_byte_is_noticed(donor: Start, monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    state = make_state(1)
    server = donor()
    server.offer("t", state)
    read, summed = RangeSums.of, RangeSums.sum
    flips: list[int] = []

    def flipping(self: RangeSums, offer: Any, index: int) -> Reading:
        flips.append(1)
        view = bytearray(read(self, offer, index).view())
        if always or len(flips) == 1:
            view[len(view) // 2] ^= 1
        return Reading(self.staging, memoryview(view), [], len(view))

    def sum_before(self: RangeSums, offer: Any, index: int, view: memoryview) -> int:
        return summed(self, offer, index, read(self, offer, index).view())

    monkeypatch.setattr(RangeSums, "of", flipping)
    monkeypatch.setattr(RangeSums, "sum", sum_before)
    if always:
        with pytest.raises(HealError, match="checksum of range"):
            fetch([server.address], "t")
    else:
        assert_same_state(fetch([server.address], "t").state, state)
        assert flips


def test_memory_that_changes_while_it_is_sent_is_noticed(donor: Start, pool: Any, gate: Gate) -> None:
    """A donor that forgets close() is caught by the checksum, which was taken before the change."""
    state = {"x": torch.zeros(4 * MIB, dtype=torch.uint8)}
    server = donor()
    server.offer("t", state)
    future = pool.submit(fetch, [server.address], "t")
    assert gate.reached.wait(10)
    state["x"][-1] = 1
    gate.resume.set()
    result = future.result(10)  # the second try
    assert int(result.state["x"].sum()) == 1
    assert result.bytes == 4 * MIB


def test_donors_of_another_model_are_left_out(donor: Start) -> None:
    servers = [donor(), donor()]
    servers[0].offer("t", {"x": torch.ones(MIB)})
    servers[1].offer("t", {"x": torch.ones(MIB), "y": torch.ones(MIB)})
    result = fetch([s.address for s in servers], "t")
    assert len(result.donors_used) == 1
    assert torch.equal(result.state["x"], torch.ones(MIB))


def test_all_donors_failing_are_all_named(donor: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        addresses = [f"http://127.0.0.1:{s.getsockname()[1]}" for s in (silent, gone)]
        gone.close()
        closed = donor()
        closed.offer("t", {})
        closed.close("t")
        with pytest.raises(HealError) as e:
            fetch([*addresses, closed.address], "t", deadline_s=2)
    text = str(e.value)
    assert f"{addresses[0]}: no answer yet" in text
    assert f"{addresses[1]}: Connection refused" in text
    assert f"{closed.address}: 410" in text


def test_a_silent_donor_loses_its_work_to_the_others(donor: Start, gate: Gate) -> None:
    state = make_state(1)
    servers = [donor(), donor()]
    for server in servers:
        server.offer("t", state)
    result = fetch([s.address for s in servers], "t", idle_s=0.2)  # nobody opens the gate
    assert_same_state(result.state, state)
    assert gate.reached.is_set()


def test_cancel_and_deadline(donor: Start, pool: Any, gate: Gate) -> None:
    server = donor()
    server.offer("t", make_state(1))
    cancel = threading.Event()
    future = pool.submit(fetch, [server.address], "t", cancel=cancel)
    assert gate.reached.wait(10)
    cancel.set()
    with pytest.raises(HealError, match="cancelled"):
        future.result(5)
    gate.resume.set()
    with pytest.raises(HealError, match=r"'never'.* (not complete after 0\.\d s|no offer)"):
        fetch([server.address], "never", deadline_s=0.1)


def test_no_thread_writes_after_fetch_returned(donor: Start, pool: Any, gate: Gate) -> None:
    state, own = make_state(1), make_state(2)
    server = donor()
    server.offer("t", state)
    cancel = threading.Event()
    future = pool.submit(fetch, [server.address], "t", into=own, cancel=cancel)
    assert gate.reached.wait(10)
    cancel.set()
    assert isinstance(future.exception(5), HealError)
    assert not [name for name in heal_threads() if "fetch" in name]
    before = own["big"].clone()
    gate.resume.set()
    server.shutdown()
    assert torch.equal(own["big"], before)


@pytest.mark.parametrize("bad", ["", "http://host", "ftp://h:1", "http://h:port", "h"])
def test_bad_addresses_are_config_errors(bad: str) -> None:
    with pytest.raises(ConfigError, match="donor address"):
        fetch([bad], "t")
    with pytest.raises(ConfigError, match="at least one"):
        fetch([], "t")


# -- strangers


@pytest.mark.parametrize("token", [None, "wrong", "secret "])
def test_the_token_is_checked(donor: Start, token: str | None) -> None:
    server = donor("secret")
    server.offer("t", {"x": 1})
    server.add_blob("b", lambda: b"hi")
    with pytest.raises(HealError, match=r"403.*FT_TOKEN"):
        fetch([server.address], "t", token=token)
    with pytest.raises(HealError, match=r"403.*FT_TOKEN"):
        get_blob(server.address, "b", token=token)
    assert fetch([server.address], "t", token="secret").state == {"x": 1}


def test_the_token_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        seen = []

        def listen() -> None:
            sock, _ = listener.accept()
            with sock:
                seen.append(sock.recv(65536))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(HealError):
            get_blob(f"http://127.0.0.1:{listener.getsockname()[1]}", "b", token="secret")
        thread.join()
    assert b"Authorization: FT1 " in seen[0]
    assert b"secret" not in seen[0]


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="FT_TOKEN"):
        StateServer("")


GARBAGE = [
    b"\x00\xff" * 50_000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /state/t/range/-1 HTTP/1.1\r\n\r\n",
    b"GET /state/t/range/x HTTP/1.1\r\n\r\n",
    b"GET /state/t/range/99999999999999999999999 HTTP/1.1\r\n\r\n",
    b"GET /state/t/sums?first=0&count=9999999 HTTP/1.1\r\n\r\n",
    b"GET /state/t/sums HTTP/1.1\r\n\r\n",
    b"GET /state/%ff%00%0d%0a/manifest HTTP/1.1\r\n\r\n",
    b"GET /state/t/manifest?wait_ms=" + b"9" * 6000 + b" HTTP/1.1\r\n\r\n",
    b"GET //[::1 HTTP/1.1\r\n\r\n",
    b"POST /state/t/manifest HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    b"DELETE /state/t/manifest HTTP/1.1\r\n\r\n",
    b"\r\n\r\n",
    b"GET /prefetch?wait_ms=abc HTTP/1.1\r\n\r\n",
]


def test_garbage_disturbs_nobody(donor: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = donor()
    server.offer("t", {"x": 1})
    for garbage in GARBAGE:
        with socket.create_connection(address_of(server)) as sock:
            sock.settimeout(5)
            try:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(65536).startswith((b"HTTP/1.1 4", b""))
            except TimeoutError:
                raise
            except OSError:
                pass  # cut before all of it was sent
    assert fetch([server.address], "t").state == {"x": 1}
    assert caplog.text == ""


def test_idle_strangers_do_not_keep_peers_out(donor: Start) -> None:
    server = donor("secret")
    server.offer("t", {"x": 1})
    strangers = [socket.create_connection(address_of(server)) for _ in range(places.PLACES_MAX + 8)]
    try:
        assert fetch([server.address], "t", token="secret").state == {"x": 1}
        assert len(server._places.served) <= places.PLACES_MAX
    finally:
        for sock in strangers:
            sock.close()


def test_a_stranger_that_says_nothing_is_cut(donor: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.1)
    with socket.create_connection(address_of(donor())) as sock:
        sock.settimeout(5)
        sock.sendall(b"GET /st")
        assert sock.recv(10) == b""


def test_a_server_that_is_not_a_donor(pool: Any) -> None:
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"SSH-2.0-OpenSSH\r\n\r\n", b"x" * 20_000]
    for answer in answers:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve(listener: socket.socket = listener, answer: bytes = answer) -> None:
                for _ in range(4):
                    try:
                        sock, _ = listener.accept()
                    except OSError:
                        return
                    with sock:
                        sock.recv(65536)
                        sock.sendall(answer)

            future = pool.submit(serve)
            with pytest.raises(HealError, match=r"127\.0\.0\.1"):
                fetch([f"127.0.0.1:{listener.getsockname()[1]}"], "t", deadline_s=5)
            listener.shutdown(socket.SHUT_RDWR)
            future.result(5)


# -- the server itself


def test_blobs(donor: Start) -> None:
    server = donor()
    server.add_blob("layout/1", lambda: b'{"a": 1}')
    server.add_blob("empty", lambda: None)
    assert get_blob(server.address, "layout/1") == b'{"a": 1}'
    assert get_blob(server.address, "empty") is None
    assert get_blob(server.address, "unknown") is None


def test_repr_is_a_summary(donor: Start) -> None:
    server = StateServer()
    assert repr(server) == "StateServer(no address, new, offers=[], Places(0 served, 0 waiting, 0 parked))"
    with pytest.raises(UsageError):
        _ = server.address
    server = donor()
    server.offer("t", {})
    assert (
        repr(server) == f"StateServer({server.address}, listening, offers=['t'], Places(0 served, 0 waiting, 0 parked))"
    )
    assert repr(server.book._offers["t"]) == "Offer('t', 0 tensors, 0 B, open)"
    server.shutdown()
    assert "stopped" in repr(server)


def test_shutdown_is_idempotent_and_leaves_nothing(donor: Start, pool: Any, gate: Gate) -> None:
    server = donor()
    server.offer("t", make_state(1))
    future = pool.submit(fetch, [server.address], "t", deadline_s=5)
    assert gate.reached.wait(10)
    waiting = pool.submit(fetch, [server.address], "later", deadline_s=5)
    gate.resume.set()
    server.shutdown()
    server.shutdown()
    assert [name for name in heal_threads() if "fetch" not in name] == []
    assert isinstance(future.exception(10), (HealError, type(None)))
    assert isinstance(waiting.exception(10), HealError)
    with pytest.raises(UsageError, match="after shutdown"):
        server.offer("t", {})
    with pytest.raises(UsageError, match="once"):
        server.start()


def test_a_port_in_use_is_a_config_error(donor: Start) -> None:
    _, port = address_of(donor())
    with pytest.raises(ConfigError, match=f"port={port}"):
        StateServer(bind="127.0.0.1", port=port).start()


@pytest.mark.parametrize("bind", ["", "::", "0.0.0.0", "::1", "127.0.0.1"])
def test_where_it_listens(bind: str) -> None:
    if bind == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    server = StateServer("secret", bind=bind, hostname=None if bind.endswith("1") else "localhost").start()
    try:
        server.offer("t", {"x": 1})
        assert fetch([server.address], "t", token="secret").state == {"x": 1}
    finally:
        server.shutdown()
