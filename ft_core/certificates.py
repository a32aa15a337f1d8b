"""The job's certificates (FT_TLS_CERT, FT_TLS_KEY, FT_TLS_CA): one place for all servers and clients of a replica.

How it works. `Tls` names PEM files and reads them; `rpc.channel` makes gRPC's credentials of them, and `server_context`
and `client_context` the same for Python's `ssl`. A job has one set: whoever holds a certificate that FT_TLS_CA signed
(or, without a CA, the job's one certificate) belongs to it. A server's certificate has to name the address it is
reached by.

Standard library only; imported by control plane and data plane.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ft_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE_S = 1.0
"""How long a server may take to show whether it speaks TLS."""


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
            raise ConfigError(f"{has} is set and {lacks} is not: a certificate and its key belong together")
        return tls if tls != Tls() else None

    @property
    def serves(self) -> bool:
        """There is a certificate to show."""
        return bool(self.cert and self.key)

    def check_serves(self, what: str) -> Tls:
        """Itself. Raises ConfigError if `what` would have to be served in clear."""
        if not self.serves:
            raise ConfigError(
                f"FT_TLS_CA={self.ca!r} alone encrypts only the way to the lighthouse, and {what} in clear: set "
                "FT_TLS_CERT and FT_TLS_KEY too, or none of the three"
            )
        return self

    def trusted(self) -> str:
        """The file that others' certificates are compared with: without a CA a job trusts exactly its own one."""
        return self.ca or self.cert

    def read(self, path: str) -> bytes:
        """One of the files. Raises ConfigError naming its variable."""
        variable = {self.key: "FT_TLS_KEY", self.cert: "FT_TLS_CERT", self.ca: "FT_TLS_CA"}[path]
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{variable}={path!r} cannot be read: {error.strerror}") from None

    def server_context(self) -> ssl.SSLContext:
        """For a server's sockets; with a CA, clients have to show a certificate, too. Raises ConfigError."""
        self.check_serves("what this server sends would go out")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        if self.ca:
            context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """For a client's sockets. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.read(self.trusted())
        context.load_verify_locations(self.trusted())
        if self.serves:
            self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        for path in (self.cert, self.key):
            self.read(path)
        try:
            context.load_cert_chain(self.cert, self.key)
        except ssl.SSLError as error:
            raise ConfigError(f"FT_TLS_CERT={self.cert!r} and FT_TLS_KEY={self.key!r}: {error.reason}") from None


def speaks_tls(host: str, port: int) -> bool | None:
    """Whether a server answers a TLS handshake, whatever its certificate; None: it is not there. Sends nothing else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        plain = socket.create_connection((host, port), PROBE_S)
    except OSError:
        return None
    try:
        with plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it answered in TLS, and refused
    except OSError:
        return False


class Diagnosis:
    """Says what to do where a connection fails because of certificates. gRPC says "Socket closed" for most of it.

    Args:
        tls: of this side.
        host, port: of the other side.
    """

    def __init__(self, tls: Tls | None, host: str, port: int) -> None:
        self._tls = tls
        self._where = host, port
        self._speaks_tls: bool | None = None

    def __repr__(self) -> str:
        return f"Diagnosis({self._where}, {self._tls})"

    def advice(self, why: str) -> str:
        """Advice for a failure in gRPC's words; '' if certificates are not the reason. May connect to find out."""
        tls = self._tls
        if tls is not None and "WRONG_VERSION_NUMBER" in why:
            return "it does not use TLS, and FT_TLS_* are set here: set them there too, or unset them here"
        if tls is not None and "CERTIFICATE_VERIFY_FAILED" in why:
            given = f"FT_TLS_CA={tls.ca!r}" if tls.ca else f"FT_TLS_CERT={tls.cert!r}"
            return f"its certificate is none that {given} trusts, or it is not made for this address"
        if "Socket closed" not in why:
            return ""
        if self._speaks_tls is None:
            self._speaks_tls = speaks_tls(*self._where)
        if not self._speaks_tls:
            return ""
        if tls is None:
            return "it uses TLS, and no certificates are set here: set FT_TLS_CA, FT_TLS_CERT and FT_TLS_KEY"
        if not tls.serves:
            return "it asks for a certificate, and there is none here: set FT_TLS_CERT and FT_TLS_KEY"
        return f"it does not accept the certificate FT_TLS_CERT={tls.cert!r}: its FT_TLS_CA has to have signed it"
