"""Who may do what: the job's token, the admin token, and which listeners may stand open (docs/security.md).

How it works. FT_TOKEN lets a process take part in the job: hold a lease, vote, receive state, report that a process
ended. FT_ADMIN_TOKEN lets an operator order others to drain or exit; where it is not set, FT_TOKEN does. Whoever holds
the admin token may do everything that the other one allows. Tokens come from the environment or from a file, never from
a command line, which every user of the machine can read; they are compared in constant time.

A listener that other machines reach demands a token, or certificates that its clients have to show. FT_INSECURE=1
(`--insecure` of the commands) says that everybody on the network is trusted. Who named no address gets one on this
machine only where there is neither.

Standard library only; imported by control plane and data plane, and by whatever else serves (dashboard, metrics).
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ft_core.errors import ConfigError
from ft_core.network import is_loopback
from ft_core.settings import switch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.certificates import Tls

TOKEN: Final = "FT_TOKEN"
ADMIN_TOKEN: Final = "FT_ADMIN_TOKEN"
MADE_TOKEN: Final = "FT_MADE_TOKEN"
"""Says of FT_TOKEN that ftrun made it for its own job: nobody else has it, and a scraper cannot send it."""
INSECURE: Final = "FT_INSECURE"
ADMIN_TOKEN_FILE: Final = "--admin-token-file"
MAX_TOKEN: Final = 4096
"""Characters of a token."""


def equal(given: str | bytes, expected: str) -> bool:
    """Whether a token is the one that is expected, in a time that does not depend on where they differ."""
    bare = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given
    return hmac.compare_digest(bare, expected.encode("utf-8", "surrogatepass"))


def check_token(token: str, variable: str = TOKEN) -> str:
    """Itself. Raises ConfigError if it cannot travel in a header."""
    if not token.isascii() or not (token.isprintable() or not token) or token != token.strip():
        raise ConfigError(f"{variable} must consist of printable ASCII characters, without blanks at its ends")
    if len(token) > MAX_TOKEN:
        raise ConfigError(f"{variable} has {len(token)} characters; at most {MAX_TOKEN} are taken")
    return token


def job_token(env: Mapping[str, str]) -> str:
    """The secret of whoever takes part in the job (FT_TOKEN); '': there is none."""
    return env.get(TOKEN, "")


def own_admin_token(env: Mapping[str, str], file: str = "") -> str:
    """FT_ADMIN_TOKEN, or what `file` holds; '' if neither is given.

    Raises:
        ConfigError: both are given and differ, or the file cannot be read, or is empty.
    """
    named = check_token(env.get(ADMIN_TOKEN, ""), ADMIN_TOKEN)
    if not file:
        return named
    where = f"{ADMIN_TOKEN_FILE} {file}"
    try:
        with open(file, "rb") as opened:
            text = opened.read(2 * MAX_TOKEN).decode("utf-8", "replace").strip()
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}; name a file that this user can read") from None
    if not text:
        raise ConfigError(f"{where} is empty: write the token into it, in one line")
    check_token(text, where)
    if named and not equal(named, text):
        raise ConfigError(f"{where} and {ADMIN_TOKEN} are both set, and differ: leave one of them out")
    return text


def admin_token(env: Mapping[str, str], file: str = "") -> str:
    """What orders to drain and kill are given with: the admin token, or where there is none, the job's.

    Raises:
        ConfigError: as `own_admin_token`.
    """
    return own_admin_token(env, file) or job_token(env)


@dataclass(frozen=True)
class Tokens:
    """What a server compares tokens with."""

    job: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)
    """Its own value; '': the job's token is enough for orders."""

    def check(self) -> Tokens:
        """Itself. Raises ConfigError if they cannot be what they are meant to be."""
        check_token(self.job)
        check_token(self.admin, ADMIN_TOKEN)
        if self.job and equal(self.job, self.admin):
            raise ConfigError(
                f"{ADMIN_TOKEN} is equal to {TOKEN}: whoever trains could order others to end; give it another value, "
                f"or unset it if that is meant so"
            )
        return self

    def admits(self, given: str | bytes | None) -> bool:
        """Whether its holder takes part in the job. Both are compared, whatever comes out."""
        if not self.job:
            return True
        bare = b"" if given is None else given
        return equal(bare, self.job) | (bool(self.admin) & equal(bare, self.admin))

    def orders(self, given: str | bytes | None) -> bool:
        """Whether its holder may order replicas to drain or exit."""
        expected = self.admin or self.job
        return bool(expected) and given is not None and equal(given, expected)


def insecure(env: Mapping[str, str]) -> bool:
    """FT_INSECURE: everybody on the network is trusted. Raises ConfigError for a value that is neither yes nor no."""
    return switch(env, INSECURE)


def open_to_all(host: str, token: str, tls: Tls | None) -> bool:
    """Whether other machines reach a server bound there, and nobody asks them who they are."""
    return not (is_loopback(host) or token or (tls is not None and tls.mutual))


def check_listener(listener: str, host: str, token: str, tls: Tls | None, danger: str, trusts_all: bool) -> None:
    """Refuse a listener that anybody could use.

    Args:
        listener: what it is called, with the setting that says where it listens.
        host: what it is bound to.
        token: what it asks for.
        tls: its certificates.
        danger: what whoever reaches it may do.
        trusts_all: that is meant so.

    Raises:
        ConfigError: other machines reach it, and it asks for nothing.
    """
    if trusts_all or not open_to_all(host, token, tls):
        return
    raise ConfigError(f"{listener} without {TOKEN}: {danger}. {REMEDY}")


REMEDY: Final = (
    f"Set {TOKEN} to the same secret in the lighthouse and all trainers; or FT_TLS_CA, FT_TLS_CERT and FT_TLS_KEY; or "
    f"stay on this machine (localhost, 127.0.0.1); or, if you trust everybody on the network, {INSECURE}=1 "
    "(ftrun, ft-lighthouse: --insecure)"
)


def asks_nothing(token: str, tls: Tls | None, trusts_all: bool) -> bool:
    """Whether a server whose user named no address has to stay on this machine."""
    return open_to_all("::", token, tls) and not trusts_all
