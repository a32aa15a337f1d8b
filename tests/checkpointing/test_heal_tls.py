"""With certificates nothing of the state travels in clear, and nobody else gets any of it."""

from __future__ import annotations

import socket
import struct
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.certificates import Tls
from ft_core.checkpointing import HTTPTransport, StateServer, fetch, get_blob, prefetch
from ft_core.checkpointing.http import places
from ft_core.checkpointing.http.connection import DonorConnection
from ft_core.errors import ConfigError, HealError, StateRefusedError
from tests.certificates import Authority
from tests.checkpointing.conftest import MIB, Gate, Trainer, assert_same_state, make_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import ThreadPoolExecutor


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Authority().files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """That of another job."""
    return Authority().files(tmp_path_factory.mktemp("other"))


@pytest.fixture
def start() -> Iterator[Callable[..., StateServer]]:
    servers: list[StateServer] = []

    def start(tls: Tls | None) -> StateServer:
        servers.append(StateServer(bind="127.0.0.1", tls=tls).start())
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()


Start = Any


def test_a_state_travels_whole_from_two_donors(start: Start, tls: Tls) -> None:
    state, own = make_state(1), make_state(2)
    servers = [start(tls), start(tls)]
    addresses = [s.address for s in servers]
    assert all(address.startswith("https://") for address in addresses)
    with Trainer(servers[0], state), Trainer(servers[1], state):
        have = prefetch(addresses, into=own, tls=tls)
    state["medium"].add_(1)
    for server in servers:
        server.offer("t", state)
    result = fetch(addresses, "t", into=own, have=have, tls=tls)
    assert_same_state(result.state, state)
    assert result.bytes == 280_000
    servers[0].add_blob("b", lambda: b"12")
    assert get_blob(addresses[0], "b", tls=tls) == b"12"


def test_nothing_can_be_read_on_the_wire(start: Start, tls: Tls) -> None:
    """Through a proxy that keeps what passes."""
    server = start(tls)
    server.offer("t", {"secret-key": torch.frombuffer(bytearray(b"secret-value" * MIB), dtype=torch.uint8)})
    host, port = server.address.removeprefix("https://").split(":")
    seen: list[bytes] = []

    def pump(a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(1 << 16):
                seen.append(data)
                b.sendall(data)
        except OSError:
            pass
        for sock in (a, b):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                near = listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            pairs = [(near, far), (far, near)]
            threads = [threading.Thread(target=pump, args=pair) for pair in pairs]
            for thread in threads:
                thread.start()
            proxied.extend(threads)
            sockets.extend((near, far))

    proxied: list[threading.Thread] = []
    sockets: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept, args=(listener,))
        acceptor.start()
        got = fetch([f"https://127.0.0.1:{listener.getsockname()[1]}"], "t", tls=tls).state
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join(5)
    for thread in proxied:
        thread.join(5)
    for sock in sockets:
        sock.close()
    assert bytes(got["secret-key"][:12].tolist()) == b"secret-value"
    wire = b"".join(seen)
    assert len(wire) > 12 * MIB
    assert b"secret-value" not in wire
    assert b"secret-key" not in wire
    assert b"/state/" not in wire


def test_who_has_no_certificate_of_the_job_gets_nothing(
    start: Start, tls: Tls, other: Tls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(tls)
    server.offer("t", {"x": 1})
    with pytest.raises(StateRefusedError, match="it uses TLS, and no certificates are set here"):
        fetch([server.address], "t", deadline_s=5)
    with pytest.raises(StateRefusedError, match="its certificate is none that FT_TLS_CA="):
        fetch([server.address], "t", tls=other, deadline_s=5)
    both = tmp_path / "both.pem"
    both.write_bytes(Path(tls.ca).read_bytes() + Path(other.ca).read_bytes())
    with pytest.raises(StateRefusedError, match="does not accept this replica's certificate"):
        fetch([server.address], "t", tls=Tls(other.cert, other.key, str(both)), deadline_s=5)
    with pytest.raises(StateRefusedError, match="does not accept this replica's certificate"):
        fetch([server.address], "t", tls=Tls(ca=tls.ca), deadline_s=5)

    send, end = DonorConnection.request, threading.Event()

    def late(connection: DonorConnection, target: str) -> None:
        for _ in range(2000):
            if not server._connections:  # it has hung up
                break
            end.wait(0.005)
        send(connection, target)

    monkeypatch.setattr(DonorConnection, "request", late)
    with pytest.raises(StateRefusedError, match="does not accept this replica's certificate"):
        fetch([server.address], "t", tls=Tls(ca=tls.ca), deadline_s=20)
    monkeypatch.undo()
    clear = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))
    with clear:
        clear.settimeout(10)
        clear.sendall(b"GET /state/t/manifest HTTP/1.1\r\n\r\n")
        answer = b""
        while data := receive(clear):
            answer += data
    assert b"HTTP" not in answer


def receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""


def test_nothing_is_received_from_who_does_not_encrypt(start: Start, tls: Tls) -> None:
    server = start(None)
    server.offer("t", {"x": 1})
    with pytest.raises(StateRefusedError, match="it does not use TLS, and FT_TLS_"):
        fetch([server.address], "t", tls=tls, deadline_s=5)
    with pytest.raises(StateRefusedError, match="it does not use TLS, and FT_TLS_"):
        fetch([server.address.replace("http:", "https:")], "t", tls=tls, deadline_s=5)


def test_a_certificate_for_another_address_is_refused(start: Start, tmp_path: Path) -> None:
    """By the server itself, and by a client that comes by another way."""
    elsewhere = Authority().files(tmp_path / "elsewhere", ["10.9.8.7"])
    with pytest.raises(ConfigError, match=r"is not made for 127\.0\.0\.1, at which others reach this process"):
        start(elsewhere)
    server = StateServer(bind="127.0.0.1", hostname="10.9.8.7", tls=elsewhere).start()
    server.offer("t", {"x": 1})
    with pytest.raises(StateRefusedError, match=r"not made for this address \(IP address mismatch"):
        fetch([server.address.replace("10.9.8.7", "127.0.0.1")], "t", tls=elsewhere, deadline_s=5)
    server.shutdown()


def test_a_donor_that_is_not_trusted_keeps_no_other_from_sending(start: Start, tls: Tls, other: Tls) -> None:
    strange, own = start(other), start(tls)
    for server in (strange, own):
        server.offer("t", {"x": 1})
    assert fetch([strange.address, own.address], "t", tls=tls, deadline_s=10).state == {"x": 1}
    own.shutdown()
    with pytest.raises(HealError, match="is none that FT_TLS_CA=") as caught:
        fetch([strange.address, own.address], "t", tls=tls, deadline_s=10)
    assert not isinstance(caught.value, StateRefusedError), "who cannot be reached now may be there the next time"


def test_a_server_without_its_own_certificate_does_not_start(tls: Tls) -> None:
    with pytest.raises(ConfigError, match="FT_TLS_CERT"):
        StateServer(bind="127.0.0.1", tls=Tls(ca=tls.ca)).start()


def test_an_offer_that_closes_under_a_transfer(start: Start, tls: Tls, gate: Gate, pool: ThreadPoolExecutor) -> None:
    first, second = start(tls), start(tls)
    state = make_state(1)
    first.offer("t", make_state(2))
    future = pool.submit(fetch, [first.address], "t", tls=tls, relays=[second.address], deadline_s=20)
    assert gate.reached.wait(10)
    first.close("t")
    gate.resume.set()
    with pytest.raises(HealError):
        future.result(20)
    first.offer("u", state)
    assert_same_state(fetch([first.address], "u", tls=tls).state, state)


@pytest.mark.parametrize("says", [b"", b"\x16\x03\x01\x02\x00"], ids=["nothing", "half a hello"])
def test_who_never_finishes_the_handshake_keeps_nobody_out(start: Start, tls: Tls, says: bytes) -> None:
    server = start(tls)
    server.offer("t", {"x": 1})
    host, port = server.address.removeprefix("https://").split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(places.PLACES_MAX + 4)]
    try:
        for sock in strangers:
            sock.sendall(says)
        assert fetch([server.address], "t", tls=tls, deadline_s=20).state == {"x": 1}
    finally:
        for sock in strangers:
            sock.close()


def test_who_is_gone_at_once_is_no_news(start: Start, tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    """A port scanner: nobody waits for it, the log has no line for each of its connections."""
    server = start(tls)
    server.offer("t", {"x": 1})
    host, port = server.address.removeprefix("https://").split(":")
    for _ in range(100):
        gone = socket.create_connection((host, int(port)))
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
    assert fetch([server.address], "t", tls=tls, deadline_s=20).state == {"x": 1}
    assert caplog.messages == []


def test_one_too_many_comes_back(
    start: Start, tls: Tls, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "WAITING_MAX", 0)
    server = start(tls)
    server.offer("t", {"x": 1})
    future = pool.submit(fetch, [server.address], "t", tls=tls, deadline_s=30)
    end = threading.Event()
    for _ in range(2000):
        if server._lingering:
            break
        end.wait(0.005)
    assert server._lingering
    monkeypatch.setattr(places, "WAITING_MAX", 8)
    assert future.result(30).state == {"x": 1}


def test_a_transport_takes_the_certificates_of_the_environment(tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in (("CERT", tls.cert), ("KEY", tls.key), ("CA", tls.ca)):
        monkeypatch.setenv(f"FT_TLS_{name}", path)
    donor, receiver = (HTTPTransport[Any](timedelta(seconds=20), bind="127.0.0.1") for _ in range(2))
    try:
        assert donor.metadata().startswith("https://")
        donor.send_checkpoint([1], 7, {"x": torch.ones(5)}, timedelta(seconds=5))
        assert torch.equal(receiver.recv_checkpoint(0, donor.metadata(), 7, timedelta(seconds=20))["x"], torch.ones(5))
    finally:
        donor.shutdown()
        receiver.shutdown()
