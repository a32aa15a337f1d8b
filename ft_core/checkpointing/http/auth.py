"""The per-job secret (`FT_TOKEN`) on every request, without sending it.

A request carries `Authorization: FT1 <nonce> <mac>`, mac = HMAC-SHA256(token, method, target, nonce). Whoever listens
on the wire sees the state itself, so what this protects against is strangers: port scanners, other jobs on the same
machines, a replica of yesterday's job. It does not encrypt and does not prevent replay of a read; use a private
network, or TLS underneath (FT_TLS_*), where that matters.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

SCHEME = "FT1"


def sign(token: str, method: str, target: str, nonce: str | None = None) -> str:
    """The value of the Authorization header."""
    nonce = nonce or secrets.token_hex(8)
    message = "\n".join((SCHEME, method, target, nonce)).encode("utf-8", "surrogatepass")
    mac = hmac.new(token.encode("utf-8", "surrogatepass"), message, hashlib.sha256).hexdigest()
    return f"{SCHEME} {nonce} {mac}"


def verify(token: str, method: str, target: str, header: str | None) -> bool:
    """Whether `header` proves knowledge of the token for exactly this request."""
    if header is None:
        return False
    parts = header.split(" ")
    if len(parts) != 3 or parts[0] != SCHEME:
        return False
    expected = sign(token, method, target, parts[1])
    return hmac.compare_digest(expected.encode("ascii", "replace"), header.encode("ascii", "replace"))
