"""The lighthouse's dashboard, if it can have one: where it listens, who may look and order there, why there is none.

How it works. 'auto' is what nobody asked for: on this machine only, on its usual port or a free one, and if that cannot
be, there is none, with a sentence. An address that was given has to work. The dashboard itself is `ft_core.dashboard`;
it is imported only where there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_core.access import Tokens, open_to_all
from ft_core.control.lighthouse.observing import RoomsSource, Tee
from ft_core.errors import ConfigError
from ft_core.rpc.channel import split_bind

if TYPE_CHECKING:
    from ft_core.certificates import Tls
    from ft_core.control.lighthouse.room_host import Rooms
    from ft_core.dashboard.server import Dashboard
    from ft_core.events.event_log import Events
    from ft_core.rpc.loop_server import LoopServer

PORT = 29511
OFF = "off"
"""No dashboard, on a command line."""
AUTO = "auto"
NOT_INSTALLED = "there is no dashboard, because aiohttp is not installed: pip install 'ft-training[dashboard]'"


class LighthouseDashboard:
    """The place for a dashboard at one lighthouse. The constructor assigns.

    Args:
        http: host:port, 'auto', or '': nobody wants one.

    Raises:
        ConfigError: one was asked for, and aiohttp is missing.
    """

    def __init__(self, http: str) -> None:
        self._http = http
        self._dashboard: Dashboard | None = None
        self._tee: Tee | None = None
        self._why_none = ""
        if http and not installed():
            if http != AUTO:
                raise ConfigError(f"http={http}: {NOT_INSTALLED}; or leave it out")
            self._why_none = NOT_INSTALLED

    def __repr__(self) -> str:
        return f"LighthouseDashboard({self.line() or 'off'})"

    def sees(self, log: Events) -> Events:
        """The log to write events to, so that the dashboard sees them, too."""
        if not self._http or self._why_none:
            return log
        self._tee = Tee(log)
        return self._tee

    def bind(self, rooms: Rooms, server: LoopServer, tls: Tls | None, trusts_all: bool) -> None:
        """Listen; nobody is answered before `start`.

        Args:
            rooms, server: what it looks at.
            tls: certificates, for what other machines reach.
            trusts_all: everybody on the network may look.

        Raises:
            ConfigError: it cannot listen where it was told to, or anybody could look.
        """
        if self._tee is None:
            return
        from ft_core.dashboard.access import Access
        from ft_core.dashboard.server import Dashboard

        auto = self._http == AUTO
        host, port = ("localhost", PORT) if auto else split_bind(self._http, "http")
        tokens = Tokens(rooms.settings.token, rooms.settings.admin_token)
        if open_to_all(host, tokens.job, None) and not trusts_all:  # no certificates: a browser has none to show
            raise ConfigError(
                f"http={self._http} without FT_TOKEN: whoever reaches this address sees the job. Set FT_TOKEN, which "
                f"the page then asks for; or stay on this machine (localhost:{PORT}); or, if you trust everybody on "
                "the network, FT_INSECURE=1 (--insecure)"
            )
        source = RoomsSource(rooms, self._tee, server)
        dashboard = Dashboard(host, port, source, Access(host, tokens), tls=tls, any_port=auto)
        try:
            dashboard.bind()
        except ConfigError as error:
            if not auto:
                raise
            self._why_none = f"there is no dashboard: {error}"
        else:
            self._dashboard = dashboard

    def start(self) -> None:
        """Serve; `bind` comes first."""
        if self._dashboard is not None:
            self._dashboard.start()

    def shutdown(self) -> None:
        """Stop serving. Idempotent; takes at most a few seconds."""
        if self._dashboard is not None:
            self._dashboard.shutdown()

    def address(self) -> str:
        """http://host:port; '': there is none."""
        return self._dashboard.address() if self._dashboard is not None else ""

    def line(self) -> str:
        """Where it is, or why there is none, for whoever starts the lighthouse; '': nobody wants one."""
        return f"dashboard: {self.address()}" if self._dashboard is not None else self._why_none


def installed() -> bool:
    """Whether what the dashboard needs is there; does not import it."""
    from ft_core.dashboard.server import available

    return available()
