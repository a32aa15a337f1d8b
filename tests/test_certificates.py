"""Certificates that cannot work are an error that names the file and what to do; new ones are read meanwhile."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import select
import socket
import struct
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ft_core import certificates
from ft_core.certificates import Tls, load
from ft_core.errors import ConfigError
from tests.certificates import SERVER_ONLY, Authority, Signed, alone, write

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def ours() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def good(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return ours.files(tmp_path_factory.mktemp("good"))


def pair(folder: Path, signed: Signed, ca: bytes = b"") -> Tls:
    return write(folder, signed.pem, signed.key_pem(), ca)


def with_file(tls: Tls, folder: Path, which: str, data: bytes) -> Tls:
    path = folder / "other.pem"
    path.write_bytes(data)
    return replace(tls, **{which: str(path)})


Bad = dict[str, "tuple[Callable[[Tls, Authority, Path], Tls], str]"]
BAD: Bad = {
    "no such file": (
        lambda tls, ca, to: replace(tls, key="/nowhere/key.pem"),
        "FT_TLS_KEY='/nowhere/key.pem' cannot be read: No such file or directory; name a PEM file",
    ),
    "a folder": (lambda tls, ca, to: replace(tls, ca=str(to)), r"FT_TLS_CA='.*' cannot be read: Is a directory"),
    "a device": (
        lambda tls, ca, to: replace(tls, key="/dev/zero"),
        "FT_TLS_KEY='/dev/zero' is a pipe or a device, and",
    ),
    "endless": (
        lambda tls, ca, to: with_file(tls, to, "ca", b"-----BEGIN CERTIFICATE-----\n" * 200_000),
        "FT_TLS_CA='.*other.pem' has more than 4194304 bytes",
    ),
    "no PEM": (
        lambda tls, ca, to: with_file(tls, to, "cert", b"DER or something"),
        r"FT_TLS_CERT='.*other.pem' holds no certificate in PEM form",
    ),
    "empty": (lambda tls, ca, to: with_file(tls, to, "ca", b""), "FT_TLS_CA='.*other.pem' holds no certificate in PEM"),
    "swapped": (
        lambda tls, ca, to: replace(tls, cert=tls.key, key=tls.cert),
        "holds no certificate but a private key: are FT_TLS_CERT and FT_TLS_KEY swapped",
    ),
    "cut off": (
        lambda tls, ca, to: with_file(tls, to, "cert", Path(tls.cert).read_bytes()[:300]),
        "FT_TLS_CERT=.* cannot be used: .*; make a new pair",
    ),
    "a CA cut off": (
        lambda tls, ca, to: with_file(tls, to, "ca", Path(tls.ca).read_bytes()[:300]),
        "FT_TLS_CA=.*other.pem' holds no certificate that can be read",
    ),
    "another key": (
        lambda tls, ca, to: with_file(tls, to, "key", ca.sign().key_pem()),
        "FT_TLS_CERT=.* and FT_TLS_KEY=.*other.pem': the key is not that of the certificate",
    ),
    "a passphrase": (
        lambda tls, ca, to: with_file(tls, to, "key", ca.sign().key_pem(b"secret")),
        "FT_TLS_KEY=.* is protected by a passphrase.*openssl pkey",
    ),
    "another CA": (
        lambda tls, ca, to: with_file(tls, to, "ca", Authority().own.pem),
        "FT_TLS_CERT=.* is not signed by FT_TLS_CA=.*name the CA that signed it",
    ),
    "no CA": (lambda tls, ca, to: replace(tls, ca=""), "FT_TLS_CERT=.* is signed by another .*: set FT_TLS_CA to the"),
    "expired": (
        lambda tls, ca, to: pair(to / "x", ca.sign(days=-0.01), ca.own.pem),
        "FT_TLS_CERT=.* has expired: make a new one",
    ),
    "an expired CA": (
        lambda tls, ca, to: Authority(days=-0.01).files(to / "x"),
        "FT_TLS_CA=.* has expired .*: make a new CA",
    ),
    "not yet": (
        lambda tls, ca, to: pair(to / "x", ca.sign(begins=1), ca.own.pem),
        "FT_TLS_CERT=.*: certificate is not yet valid; is this machine's clock right",
    ),
    "for servers only": (
        lambda tls, ca, to: pair(to / "x", ca.sign(usage=SERVER_ONLY), ca.own.pem),
        "not made for both sides of a connection .*serverAuth,clientAuth",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_named(case: str, good: Tls, ours: Authority, tmp_path: Path) -> None:
    make, says = BAD[case]
    with pytest.raises(ConfigError, match=says):
        load(make(good, ours, tmp_path))


def test_what_works(good: Tls, tmp_path: Path) -> None:
    assert load(good).server is not None
    assert load(Tls(ca=good.ca)).server is None
    assert load(pair(tmp_path / "alone", alone())).server is not None
    both = tmp_path / "both.pem"
    both.write_bytes(Path(good.cert).read_bytes() + Path(good.key).read_bytes())
    assert load(replace(good, cert=str(both), key=str(both))).server is not None


def test_a_connection_whose_other_side_has_gone_is_closed(good: Tls) -> None:
    """Whenever it went after it was accepted; one that is left to the collector is a warning, which fails this."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        reset = select.poll()
        reset.register(accepted, select.POLLIN)
        assert reset.poll(5000)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with pytest.raises(ConnectionResetError):
                good.files().encrypt(accepted)
            gc.collect()
        assert not seen


def test_a_certificate_has_to_name_the_address(good: Tls) -> None:
    assert good.check_names("127.0.0.1") is good
    assert good.check_names("localhost") is good
    with pytest.raises(ConfigError, match=r"is not made for 10\.1\.2\.3, at which others reach .*subjectAltName"):
        good.check_names("10.1.2.3")


def test_the_first_look_raises_and_later_ones_keep_what_works(
    ours: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ft_core.certificates")
    first = ours.sign(days=30)
    tls = pair(tmp_path / "x", first, ours.own.pem)
    files = tls.files()
    before = files.look()
    assert files.look() is files.now is before
    write(tmp_path / "x", ours.sign().pem, first.key_pem(), ours.own.pem)  # half of a replacement
    for _ in range(3):
        assert files.look() is before
    (said,) = caplog.messages
    assert "the key is not that of the certificate" in said
    assert "What was read before stays in force" in said
    second = ours.sign(days=30)
    write(tmp_path / "x", second.pem, second.key_pem(), ours.own.pem)
    assert files.look().cert == files.now.cert == second.pem
    assert caplog.messages[1:] == ["FT_TLS_*: the files have changed; new connections use what they hold now"]
    os.unlink(tls.key)
    assert files.look().cert == second.pem
    assert "FT_TLS_KEY=" in caplog.messages[-1]
    assert "cannot be read: No such file" in caplog.messages[-1]


def test_a_set_that_never_worked_is_tried_again(ours: Authority, tmp_path: Path) -> None:
    tls = pair(tmp_path / "x", ours.sign(days=-0.01), ours.own.pem)
    for _ in range(2):
        with pytest.raises(ConfigError, match="has expired"):
            tls.files().look()
    pair(tmp_path / "x", ours.sign(), ours.own.pem)
    assert tls.files().now.server is not None


def test_what_does_not_work_yet_is_tried_again_without_a_change(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time may not have come, by this machine's clock."""
    tls = pair(tmp_path / "x", ours.sign(), ours.own.pem)
    files = tls.files()
    before = files.look()
    pair(tmp_path / "x", new := ours.sign(), ours.own.pem)
    with monkeypatch.context() as broken:
        broken.setattr(certificates, "load", refuse)
        assert files.look() is before
    assert files.look() is before
    monkeypatch.setattr(certificates, "AGAIN_S", 0.0)
    assert files.look().cert == new.pem


def refuse(tls: Tls) -> certificates.Loaded:
    raise ConfigError("not yet")


def test_soon_expired_is_said_once(ours: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls = pair(tmp_path / "x", ours.sign(days=0.5, begins=-0.7), ours.own.pem)
    tls.files().look()
    assert not caplog.messages, "of a day and a fifth, less than a quarter has to be left"
    pair(tmp_path / "x", ours.sign(days=0.5, begins=-2), ours.own.pem)
    for _ in range(3):
        tls.files().look()
    (said,) = caplog.messages
    assert "expires in 12.0 hours" in said
    pair(tmp_path / "x", ours.sign(days=30), ours.own.pem)
    tls.files().look()
    assert len(caplog.messages) == 1


def test_servers_have_them_looked_at(ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "LOOK_S", 0.005)
    tls = pair(tmp_path / "x", ours.sign(), ours.own.pem)
    files = tls.files()
    files.watch()
    files.watch()
    files.unwatch()
    new = ours.sign()
    pair(tmp_path / "x", new, ours.own.pem)
    end = threading.Event()
    for _ in range(2000):
        if files.now.cert == new.pem:
            break
        end.wait(0.005)
    assert files.now.cert == new.pem
    files.unwatch()
    assert repr(files).endswith("read, watchers=0)")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors there")
def test_without_free_descriptors_what_was_read_stays_in_force(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the thread that looks is not ended by it."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.005)
    monkeypatch.setattr(certificates, "AGAIN_S", 0.05)
    tls = pair(tmp_path / "x", ours.sign(days=30), ours.own.pem)
    files = tls.files()
    files.watch()
    try:
        before, new, end = files.now, ours.sign(days=30), threading.Event()
        pair(tmp_path / "new", new, ours.own.pem)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            os.close(held.pop())  # one is left, with which the files can be read
            for name in ("cert.pem", "key.pem"):
                os.replace(tmp_path / "new" / name, tmp_path / "x" / name)
            for _ in range(2000):
                if any("Too many open files" in said for said in caplog.messages):
                    break
                end.wait(0.005)
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "What was read before stays in force" in caplog.text
        assert before.cert != new.pem
        for _ in range(2000):
            if files.now.cert == new.pem:
                break
            end.wait(0.005)
        assert files.now.cert == new.pem, "it is tried again"
    finally:
        files.unwatch()


@pytest.mark.forks
def test_a_forked_child_looks_at_the_files_of_its_own_servers(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent had a lighthouse, say, whose thread did not come along; or was just reading."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.005)
    tls = pair(tmp_path / "x", ours.sign(days=30), ours.own.pem)
    files, new = tls.files(), ours.sign(days=30)
    files.watch()
    try:
        assert files._reading.acquire(timeout=10)  # not released before the fork
        child = os.fork()
        if child == 0:
            try:
                files.watch()
                pair(tmp_path / "x", new, ours.own.pem)
                for _ in range(2000):
                    if files.now.cert == new.pem:
                        os._exit(0)
                    threading.Event().wait(0.005)
            finally:
                os._exit(1)
        files._reading.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        files.unwatch()


def test_a_process_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "MAX_SETS", 2)
    monkeypatch.setattr(certificates, "_sets", {})
    first = Tls("1").files()
    assert Tls("1").files() is first
    Tls("2").files()
    Tls("1").files()
    Tls("3").files()
    assert Tls("1").files() is first
    assert list(certificates._sets) == [Tls("3"), Tls("1")]
