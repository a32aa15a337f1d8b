"""Says what to do where a connection fails because of certificates. gRPC says "Socket closed" for most of it.

How it works. A failure that may be one of certificates is looked into by a connection of our own, with Python's `ssl`,
which tells whether the other side uses TLS at all, and what of its certificate is wrong. It ends after the handshake;
nothing is sent. Bound: PROBE_S per question, and each is asked once in LOOK_AGAIN_S.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ft_core.certificates import Tls

PROBE_S: Final = 1.0
"""How long a server may take to show whether it speaks TLS."""
LOOK_AGAIN_S: Final = 10.0


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


def distrust(tls: Tls, host: str, port: int) -> str:
    """What `tls` finds wrong with the certificate of a server, in OpenSSL's words; '' if nothing (or nobody)."""
    try:
        with (
            socket.create_connection((host, port), PROBE_S) as plain,
            tls.files().now.client.wrap_socket(plain, server_hostname=host),
        ):
            return ""
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except OSError:
        return ""


class Diagnosis:
    """What certificates have to do with it that a connection fails.

    Args:
        tls: of this side.
        host, port: of the other side.
    """

    def __init__(self, tls: Tls | None, host: str, port: int) -> None:
        self._tls = tls
        self._where = host, port
        self._speaks_tls: bool | None = None
        self._looked_at = float("-inf")
        self._distrust = ""

    def __repr__(self) -> str:
        return f"Diagnosis({self._where}, {self._tls})"

    def advice(self, why: str) -> str:
        """Advice for a failure in gRPC's words; '' if certificates are not the reason. May connect to find out."""
        tls = self._tls
        if tls is not None and "WRONG_VERSION_NUMBER" in why:
            return "it does not use TLS, and FT_TLS_* are set here: set them there too, or unset them here"
        if tls is not None and "CERTIFICATE_VERIFY_FAILED" in why:
            return self._of_their_certificate(tls)
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
        if tls.files().now.expires < time.time():
            return f"it does not accept the certificate FT_TLS_CERT={tls.cert!r}, which has expired: replace the file"
        return f"it does not accept the certificate FT_TLS_CERT={tls.cert!r}: its FT_TLS_CA has to have signed it"

    def _of_their_certificate(self, tls: Tls) -> str:
        now = time.monotonic()
        if now - self._looked_at >= LOOK_AGAIN_S:
            self._looked_at = now
            self._distrust = distrust(tls, *self._where)
        given = f"FT_TLS_CA={tls.ca!r}" if tls.ca else f"FT_TLS_CERT={tls.cert!r}"
        because = f" ({self._distrust})" if self._distrust else ""
        return f"its certificate is none that {given} trusts, or it is not made for this address{because}"
