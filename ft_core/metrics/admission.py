"""Whom a page is served to: the access rule of all listeners (`ft_core.access`), for one that is asked in HTTP.

How it works. What only this machine reaches is open, and in clear text. What others reach demands the job's token,
which Prometheus sends as `Authorization: Bearer`; where the job has certificates it is served with them, as a token in
clear text gives the whole job away. A token that ftrun made for its own job is known to nobody who could send it: it
opens no address to other machines, and is not demanded.

Invariants: `check` refuses before anything is bound; a request is refused before anything is looked up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ft_core.access import TOKEN, Tokens, check_listener
from ft_core.network import is_loopback

if TYPE_CHECKING:
    from ft_core.certificates import Tls

DANGER: Final = "whoever reaches this address may read the names, steps and times of the job"
REFUSED: Final = (
    f"metrics are served to whoever sends {TOKEN} (Prometheus: authorization, with credentials_file; "
    'curl: -H "Authorization: Bearer ...")\n'
)


@dataclass(frozen=True)
class Admission:
    """Who may read what a process serves at an address that other machines reach.

    Args:
        tokens: of which one is demanded; without any, none is.
        tls: the job's certificates.
        trusts_all: everybody who reaches the address may read, and that is meant so.
    """

    tokens: Tokens = field(default_factory=Tokens, repr=False)
    tls: Tls | None = None
    trusts_all: bool = False

    def check(self, host: str, listener: str) -> None:
        """Refuse an address at which anybody could read. `listener`: the setting, with its value."""
        check_listener(listener, host, self.tokens.job, self._serving(), DANGER, self.trusts_all)

    def certificates(self, host: str) -> Tls | None:
        """What to serve with there; None: in clear text."""
        return None if is_loopback(host) else self._serving()

    def guard(self, host: str, application: Callable[..., Any]) -> Callable[..., Any]:
        """A WSGI application, for those who may."""
        if is_loopback(host) or not self.tokens.job:
            return application

        def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            if self.tokens.admits(_bearer(environ.get("HTTP_AUTHORIZATION", ""))):
                return application(environ, start_response)
            start_response(
                "401 Unauthorized",
                [("Content-Type", "text/plain; charset=utf-8"), ("WWW-Authenticate", 'Bearer realm="metrics"')],
            )
            return [REFUSED.encode()]

        return guarded

    def _serving(self) -> Tls | None:
        """A CA alone encrypts nothing here, and asks nobody for anything."""
        return self.tls if self.tls is not None and self.tls.serves else None


def _bearer(header: str) -> str:
    """The token in a header; '': there is none."""
    scheme, _, token = header.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
