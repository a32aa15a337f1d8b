"""Who may look at the dashboard, and who may drain and kill. Pure.

How it works. `ft_core.access` has the rule; this is what it means here. On loopback everybody on this machine may look;
elsewhere whoever takes part in the job. Orders need the token for orders, on loopback, too; where none is configured,
none are taken. The token travels in the Authorization header, never in an address.

Other sites' pages run in the user's browser, which reaches loopback, too. So on loopback a request must name this
machine as its host (a foreign name that leads here is DNS rebinding), and an order must come from the page itself: the
browser's Origin has to be the host that it asks, and a header that no foreign page may set has to be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.network import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ft_core.access import Tokens

OWN_HEADER = "X-FT-Dashboard"
"""A page of another site may send it only after it has asked, and is refused then (CORS)."""
OFF = (
    "Drain and kill are off, because there is no admin token: set FT_ADMIN_TOKEN (or FT_TOKEN) where the lighthouse is "
    "started"
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered."""

    status: int
    """As in HTTP: 401: a token is missing or wrong; 403: not from there, or not at all; 400: no proper request."""
    text: str


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one dashboard."""

    host: str
    """What it listens on."""
    tokens: Tokens

    def __repr__(self) -> str:
        return f"Access({self.host}, {'orders' if not self.orders_off else 'no orders'})"

    @property
    def local(self) -> bool:
        """Only this machine reaches it."""
        return is_loopback(self.host)

    @property
    def orders_off(self) -> str:
        """Why no orders are taken from anybody; '': they are."""
        return "" if self.tokens.admin or self.tokens.job else OFF

    @property
    def looking_needs_token(self) -> bool:
        """Nobody may look without one."""
        return not self.local and bool(self.tokens.job)

    def host_refusal(self, headers: Mapping[str, str]) -> Refusal | None:
        """Whether the request was meant for this machine. Comes first, for every path."""
        host = _host(headers.get("Host", ""))
        if self.local and not is_loopback(host):
            return Refusal(
                403,
                f"the host {host[:80]!r} is not this machine's loopback address: open http://localhost:PORT instead",
            )
        return None

    def look_refusal(self, headers: Mapping[str, str]) -> Refusal | None:
        """Whether what the lighthouse knows may be sent."""
        if not self.looking_needs_token or self.tokens.admits(_token(headers)):
            return None
        return Refusal(401, "a token is needed: FT_TOKEN or FT_ADMIN_TOKEN, as `Authorization: Bearer TOKEN`")

    def order_refusal(self, headers: Mapping[str, str]) -> Refusal | None:
        """Whether an order may be given."""
        if self.orders_off:
            return Refusal(403, self.orders_off)
        origin, site = headers.get("Origin", ""), headers.get("Sec-Fetch-Site", "")
        if site not in ("", "same-origin", "none") or (
            origin and origin.partition("://")[2] != headers.get("Host", "")
        ):
            return Refusal(
                403, f"orders are taken from the dashboard's own page, not from {origin[:80] or 'another site'}"
            )
        if not headers.get(OWN_HEADER):
            return Refusal(403, f"an order needs the header {OWN_HEADER}: 1, which other sites' pages cannot send")
        if not self.tokens.orders(_token(headers)):
            given = "is wrong" if headers.get("Authorization") else "is missing"
            return Refusal(
                401,
                f"the admin token {given}: FT_ADMIN_TOKEN as the lighthouse has it, or FT_TOKEN where that is not set "
                "(where neither is, ftrun has made one that nobody knows: start it with FT_ADMIN_TOKEN)",
            )
        return None


def _host(text: str) -> str:
    """The host of host:port, [v6]:port."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if ":" in text else text


def _token(headers: Mapping[str, str]) -> str | None:
    kind, _, given = headers.get("Authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else None
