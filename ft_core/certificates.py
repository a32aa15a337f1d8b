"""The job's certificates (FT_TLS_CERT, FT_TLS_KEY, FT_TLS_CA): one place for all servers and clients of a process.

How it works. `Tls` names PEM files. `CertificateFiles`, one per `Tls` in a process, reads them, proves that they work,
and reads them again when they change: `now` is what they held when they last worked, as bytes for gRPC and as contexts
for Python's `ssl`. The proof is a TLS handshake of this process with itself, in memory: what a peer would refuse
(expired, signed by somebody else, a key that does not fit) is a ConfigError that names the variable, the file and what
to do. A job has one set: whoever holds a certificate that FT_TLS_CA signed (or, without a CA, the job's one
certificate) belongs to it. A server's certificate has to name the address it is reached by.

Invariants: once `now` was read, it is never worse than before: a new file that does not work is logged once, and what
was read before stays in force. Connections keep what they began with. Files are read by whoever opens a connection
to a server (`look`), and for servers, whose threads must not wait for a disk, by the thread "ft-certificates", which
runs while a server of this process is watched for. Standard library only; imported by control plane and data plane.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import ssl
import stat
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

LOOK_S: Final = 1.0
"""How often the files of a server are looked at."""
AGAIN_S: Final = 30.0
"""A set that did not work is tried again after this time, though no file changed: it may not have been valid yet."""
SOON_S: Final = 3 * 24 * 3600.0
SOON_PART: Final = 0.25
"""A certificate is worth a warning for the last part of its time, SOON_S at most: some live a day, and are replaced."""
MAX_BYTES: Final = 4 << 20
"""Of a PEM file; a machine's bundle of all public CAs has a quarter of a MiB."""
MAX_SETS: Final = 64
"""Sets of files that one process remembers; a job has one."""
HANDSHAKE_ROUNDS: Final = 8
"""A handshake takes two or three."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tls:
    """PEM files (FT_TLS_CERT, FT_TLS_KEY, FT_TLS_CA). With `ca` a server asks its clients for certificates too."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    @staticmethod
    def from_env(env: Mapping[str, str]) -> Tls | None:
        """What FT_TLS_* name; None if they name nothing.

        Raises:
            ConfigError: a certificate without its key, or the other way round.
        """
        tls = Tls(env.get("FT_TLS_CERT", ""), env.get("FT_TLS_KEY", ""), env.get("FT_TLS_CA", ""))
        if bool(tls.cert) != bool(tls.key):
            has, lacks = ("FT_TLS_CERT", "FT_TLS_KEY") if tls.cert else ("FT_TLS_KEY", "FT_TLS_CERT")
            raise ConfigError(
                f"{has} is set and {lacks} is not: a certificate and its key belong together; set {lacks} to the "
                "PEM file with the other one"
            )
        return tls if tls != Tls() else None

    @property
    def serves(self) -> bool:
        """There is a certificate to show."""
        return bool(self.cert and self.key)

    @property
    def mutual(self) -> bool:
        """Servers ask their clients for certificates."""
        return bool(self.ca)

    def check_serves(self, what: str) -> Tls:
        """Itself. Raises ConfigError if `what` would have to be served in clear."""
        if not self.serves:
            raise ConfigError(
                f"FT_TLS_CA={self.ca!r} alone encrypts only the way to the lighthouse, and {what} in clear: set "
                "FT_TLS_CERT and FT_TLS_KEY too, or none of the three"
            )
        return self

    def check_names(self, host: str) -> Tls:
        """Itself. Raises ConfigError if clients that connect to this process at `host` would refuse its certificate."""
        wrong = self.files().now.misnamed(host)
        if wrong:
            raise ConfigError(
                f"FT_TLS_CERT={self.cert!r} is not made for {host}, at which others reach this process ({wrong}): make "
                "one with this as a subjectAltName (IP:address or DNS:name), or set FT_HOSTNAME to a name that it has"
            )
        return self

    def files(self) -> CertificateFiles:
        """What this process knows of these files: one object, whoever asks."""
        with _lock:
            found = _sets.pop(self, None) or CertificateFiles(self)
            while len(_sets) >= MAX_SETS:
                _sets.pop(next(iter(_sets)))
            _sets[self] = found
        return found


@dataclass(frozen=True)
class Loaded:
    """What the files of a `Tls` held at one time, and that they work together is proven."""

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)
    client: ssl.SSLContext
    """For a client's sockets."""
    server: ssl.SSLContext | None
    """For a server's sockets; with a CA, clients have to show a certificate, too. None: there is none to show."""
    page: ssl.SSLContext | None
    """For a server that browsers read: they are not asked for a certificate. None: there is none to show."""
    expires: float
    """Seconds since 1970; inf: there is no certificate of one's own."""
    soon: float
    """When to warn of that, likewise."""

    @property
    def trusted(self) -> bytes:
        """What others' certificates are compared with: without a CA a job trusts exactly its own one."""
        return self.ca or self.cert

    def misnamed(self, host: str) -> str:
        """Why clients that reach this process at `host` refuse its certificate, in OpenSSL's words; '' if none do."""
        if self.server is None:
            return ""
        try:
            _shake_hands(self.client, self.server, host)
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        return ""


class CertificateFiles:
    """The files of one `Tls` in this process; see the module's text. Use `Tls.files()`."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self._reading = threading.Lock()
        self._loaded: Loaded | None = None
        self._seen: object = None
        """What the file system said of the files when they were read last."""
        self._failed_at: float | None = None
        """When they last did not work (monotonic s)."""
        self._said = ""
        self._expiry_told: Loaded | None = None
        self._watchers = 0
        self._end: threading.Event | None = None

    def __repr__(self) -> str:
        return f"CertificateFiles({self.tls}, {'read' if self._loaded else 'not read'}, watchers={self._watchers})"

    @property
    def now(self) -> Loaded:
        """What is in force. Reads files the first time only. Raises ConfigError then."""
        return self._loaded or self.look()

    def look(self) -> Loaded:
        """Read what has changed; what is in force then. Raises ConfigError if nothing ever worked."""
        loaded = self._loaded
        if not self._reading.acquire(blocking=loaded is None):
            assert loaded is not None
            return loaded  # another thread reads just now
        try:
            return self._look()
        finally:
            self._reading.release()

    def _look(self) -> Loaded:
        loaded, seen, now = self._loaded, self._stamps(), time.monotonic()
        again = self._failed_at is not None and now - self._failed_at >= AGAIN_S
        if loaded is None or seen != self._seen or again:
            self._failed_at = None
            try:
                read = load(self.tls)
            except ConfigError as error:
                if loaded is None:
                    raise
                self._seen, self._failed_at = seen, now
                if str(error) != self._said:
                    self._said = str(error)
                    _log.warning("%s. What was read before stays in force", error)
                return loaded
            self._seen = seen
            if loaded is not None and (read.cert, read.key, read.ca) != (loaded.cert, loaded.key, loaded.ca):
                _log.info("FT_TLS_*: the files have changed; new connections use what they hold now")
            self._loaded, self._said = read, ""
            loaded = read
        if time.time() > loaded.soon and self._expiry_told is not loaded:
            self._expiry_told = loaded
            left_h = (loaded.expires - time.time()) / 3600
            _log.warning(
                "FT_TLS_CERT=%r expires in %.1f hours, and no connection is made with it then: replace the file, "
                "which is read again without a restart", self.tls.cert, max(0.0, left_h),
            )  # fmt: skip
        return loaded

    def _stamps(self) -> object:
        def stamp(path: str) -> object:
            try:
                found = os.stat(path)
            except OSError as error:
                return error.errno
            return found.st_mtime_ns, found.st_size, found.st_ino

        return tuple(stamp(path) for path in (self.tls.cert, self.tls.key, self.tls.ca))

    def encrypt(self, plain: socket.socket) -> socket.socket:
        """A server's end of a connection, on which nothing was said yet. Raises OSError: the other side has gone."""
        context = self.now.server
        if context is None:
            return plain
        return context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)

    def watch(self) -> None:
        """A server uses them from now on, until `unwatch`: they are looked at every LOOK_S. Raises ConfigError."""
        self.look()
        with _lock:
            self._watchers += 1
            if self._end is None:
                self._end = threading.Event()
                threading.Thread(target=self._watch, args=(self._end,), name="ft-certificates", daemon=True).start()

    def unwatch(self) -> None:
        """The server has ended."""
        with _lock:
            self._watchers -= 1
            if self._watchers == 0 and self._end is not None:
                self._end.set()
                self._end = None

    def _watch(self, end: threading.Event) -> None:
        while not end.wait(LOOK_S):
            self.look()

    def forked(self) -> None:
        """In a child: its parent's servers are not its own, and no thread has come along. What was read stays."""
        self._reading = threading.Lock()
        self._watchers, self._end = 0, None


_sets: dict[Tls, CertificateFiles] = {}
_lock = threading.Lock()
"""For `_sets`, and for who watches."""


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    for files in list(_sets.values()):
        files.forked()


os.register_at_fork(after_in_child=_forked)


def load(tls: Tls) -> Loaded:
    """Read the files and prove that they work.

    Raises:
        ConfigError: they do not; it names the variable, the file and what to do.
    """
    cert = _read("FT_TLS_CERT", tls.cert, b"CERTIFICATE-----")
    key = _read("FT_TLS_KEY", tls.key, b"PRIVATE KEY-----")
    ca = _read("FT_TLS_CA", tls.ca, b"CERTIFICATE-----")
    if b"ENCRYPTED" in key:
        raise ConfigError(
            f"FT_TLS_KEY={tls.key!r} is protected by a passphrase, which nobody is there to enter: write it without "
            "one (openssl pkey -in KEY -out NEW), into a file that only this user can read"
        )
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting = ("FT_TLS_CA", tls.ca, ca) if ca else ("FT_TLS_CERT", tls.cert, cert)
    _trust(client, *trusting)
    if not cert:
        return Loaded(cert, key, ca, client, None, None, float("inf"), float("inf"))
    server, page = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.sslsocket_class = Accepted
    for context in (client, server, page):
        _show(context, tls, cert, key)
    if ca:
        _trust(server, *trusting)
        server.verify_mode = ssl.CERT_REQUIRED
    begins, expires = _prove(tls, client, server)
    soon = expires - min(SOON_S, SOON_PART * (expires - begins))
    return Loaded(cert, key, ca, client, server, page, expires, soon)


def _read(variable: str, path: str, holds: bytes) -> bytes:
    if not path:
        return b""
    try:
        if stat.S_IFMT(os.stat(path).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise ConfigError(
                f"{variable}={path!r} is a pipe or a device, and it is read more than once: write it into a file"
            )
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{variable}={path!r} cannot be read: {error.strerror}; name a PEM file that this user can read"
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{variable}={path!r} has more than {MAX_BYTES} bytes: name the PEM file")
    if holds in data:
        return data
    wanted = "private key" if variable == "FT_TLS_KEY" else "certificate"
    other = "a certificate" if b"CERTIFICATE-----" in data else "a private key" if b"PRIVATE KEY-----" in data else ""
    found = f"but {other}: are FT_TLS_CERT and FT_TLS_KEY swapped?" if other else "in PEM form (-----BEGIN ...)"
    raise ConfigError(f"{variable}={path!r} holds no {wanted} {found}")


class Accepted(ssl.SSLSocket):
    """A server's end of a connection, which is closed where the other side has gone.

    `ssl` takes the plain socket over, asks who the other side is, and where that has gone since it was accepted, fails
    and leaves the socket to the garbage collector.
    """

    def getpeername(self) -> Any:
        """Return the other side's address. Raises ConnectionResetError, when this is closed: it has gone."""
        try:
            return super().getpeername()
        except OSError as error:
            self.close()
            raise ConnectionResetError(errno.ECONNRESET, "the other side has gone") from error


def _trust(context: ssl.SSLContext, variable: str, path: str, pem: bytes) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{variable}={path!r} holds no certificate that can be read: {_words(error)}") from None


def _show(context: ssl.SSLContext, tls: Tls, cert: bytes, key: bytes) -> None:
    """Both out of memory, though `ssl` takes only paths: the files may be replaced just now."""
    both = f"FT_TLS_CERT={tls.cert!r} and FT_TLS_KEY={tls.key!r}"
    try:
        with _as_file(cert) as cert_path, _as_file(key) as key_path:
            context.load_cert_chain(cert_path, key_path, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{both}: the key is not that of the certificate; name the two that were made together"
            ) from None
        raise ConfigError(
            f"{both} cannot be used: {_words(error)}; make a new pair (docs/security.md says how)"
        ) from None
    except OSError as error:  # the process is out of descriptors, or there is no /proc
        raise ConfigError(f"{both} cannot be used: {error.strerror} (descriptors? ulimit -n; /proc?)") from None


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    fd = os.memfd_create("ft-certificate")
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _prove(tls: Tls, client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[float, float]:
    """When the certificate begins and ends (s since 1970), if this process accepts its own. Raises ConfigError."""
    client.check_hostname = False
    try:
        shown = _shake_hands(client, server, None)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(_refused(tls, client, error)) from None
    except ssl.SSLError as error:
        raise ConfigError(
            f"FT_TLS_CERT={tls.cert!r} and FT_TLS_KEY={tls.key!r} cannot be used: {_words(error)}; make a new pair "
            "(docs/security.md says how)"
        ) from None
    finally:
        client.check_hostname = True
    begins, expires = (float(ssl.cert_time_to_seconds(str(shown[name]))) for name in ("notBefore", "notAfter"))
    return begins, expires


def _refused(tls: Tls, client: ssl.SSLContext, error: ssl.SSLCertVerificationError) -> str:
    """What to say of a certificate that does not pass its own job's test."""
    now, cert = time.time(), f"FT_TLS_CERT={tls.cert!r}"
    if error.verify_message == "certificate has expired":
        over = [c for c in client.get_ca_certs() if ssl.cert_time_to_seconds(str(c["notAfter"])) < now]
        if tls.ca and over:
            return f"FT_TLS_CA={tls.ca!r} has expired ({over[0]['notAfter']}): make a new CA, and certificates by it"
        return f"{cert} has expired: make a new one (a running process reads it when the file is replaced)"
    if error.verify_message == "certificate is not yet valid":
        return f"{cert}: certificate is not yet valid; is this machine's clock right ({time.ctime(now)})?"
    if "purpose" in error.verify_message:
        return (
            f"{cert} is not made for both sides of a connection ({error.verify_message}): a replica serves and "
            "asks, so make it with extendedKeyUsage=serverAuth,clientAuth, or without that extension"
        )
    if tls.ca:
        return (
            f"{cert} is not signed by FT_TLS_CA={tls.ca!r} ({error.verify_message}): name the CA that signed it (with "
            "all between them in the certificate's file), or make a certificate with this CA"
        )
    return (
        f"{cert} is signed by another certificate ({error.verify_message}): set FT_TLS_CA to the file that holds that"
    )


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str | None) -> Mapping[str, object]:
    """A handshake in memory. Returns the server's certificate. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=host)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(HANDSHAKE_ROUNDS):
        if all([_step(near), _step(far)]):
            break
    return near.getpeercert() or {}


def _step(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _words(error: Exception) -> str:
    return (error.reason or "not understood") if isinstance(error, ssl.SSLError) else str(error)
