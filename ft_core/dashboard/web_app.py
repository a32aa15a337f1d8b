"""The dashboard's paths, on aiohttp: page, events, status, health, orders.

How it works. Every request passes `_guard`: it must be meant for this host (`access`), and every answer carries headers
that keep it from being framed, sniffed or cached. `Desk` has what the paths look at; `server` renews it.

Invariants: no write waits longer than WRITE_S for its reader, then the connection is cut; one that sends no request
within SILENT_S is cut, too. A request's body is at most BODY_BYTES. Everything runs on the dashboard's loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web
from aiohttp.http import HttpProcessingError

from ft_core.errors import FaultToleranceError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ft_core.dashboard.access import Access, Refusal
    from ft_core.dashboard.feed import Feed
    from ft_core.dashboard.model import Model

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

WRITE_S = 10.0
SILENT_S = 10.0
BODY_BYTES = 16 << 10
TEXT_MAX = 200
"""Characters of a reason, and of a room's or replica's name, in an order."""

FILES = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/view.js": ("view.js", "text/javascript"),
    "/chart.js": ("chart.js", "text/javascript"),
    "/words.js": ("words.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_log = logging.getLogger("ft_core.lighthouse")


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether aiohttp logs a mistake of ours. That somebody sent what is no HTTP is answered, and no news."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


http_log = logging.getLogger("ft_core.lighthouse.http")
"""What aiohttp logs."""
http_log.addFilter(_is_ours)


class Desk(Protocol):
    """What the paths look at."""

    access: Access
    feed: Feed

    def page(self) -> Model:
        """The newest page."""

    def encoded(self) -> bytes:
        """The same as JSON."""

    def illness(self) -> str:
        """Why the lighthouse does not work, as a sentence; '': it does."""

    def unready(self) -> str:
        """Why nobody should be sent to it yet; '': it is ready."""

    def standing(self) -> str:
        """What the lighthouse does in a pair, in words for everybody; '': it is alone."""

    async def order(self, *, kill: bool, room: str, replica: str, reason: str) -> list[str]:
        """Who was sent the order."""


class WebApp:
    """All paths of one dashboard."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.silent: set[object] = set()
        """Connections over which no request has come yet; each is taken out after SILENT_S at the latest."""
        files = resources.files("ft_core.dashboard").joinpath("page")
        self._files = {path: (files.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    def __repr__(self) -> str:
        return f"WebApp({self._desk.feed!r})"

    def application(self) -> web.Application:
        """What aiohttp runs."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        app = web.Application(middlewares=[guard], client_max_size=BODY_BYTES)
        routes: list[web.AbstractRouteDef] = [web.get(path, self._file) for path in self._files]
        routes += [
            web.get("/events", self._events),
            web.get("/status.json", self._status),
            web.get("/healthz", self._healthz),
            web.get("/readyz", self._readyz),
            web.post("/drain", self._order),
            web.post("/kill", self._order),
        ]
        app.add_routes(routes)
        return app

    # ------------------------------------------------------------ every request

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.silent.discard(request.protocol)
        refusal = self._desk.access.host_refusal(request.headers)
        try:
            response = _refused(refusal) if refusal is not None else await handler(request)
        except web.HTTPException as error:  # 404, 405, 413: in one sentence, with our headers
            response = _text(f"{error.status} {error.reason}\n", error.status)
            response.headers.update({k: v for k, v in error.headers.items() if k == "Allow"})
        if not response.prepared:
            response.headers.update(HEADERS)
        return await self._sent(request, response)

    @staticmethod
    async def _sent(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Send an answer, if its reader takes it within WRITE_S."""

        async def send() -> None:
            await response.prepare(request)
            await response.write_eof()

        try:
            await asyncio.wait_for(send(), WRITE_S)
        except asyncio.TimeoutError:
            _cut(request)
        except ConnectionError:
            pass  # it has gone
        return response

    # ------------------------------------------------------------ looking

    async def _file(self, request: web.Request) -> web.StreamResponse:
        body, kind = self._files[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _status(self, request: web.Request) -> web.StreamResponse:
        refusal = self._desk.access.look_refusal(request.headers)
        if refusal is not None:
            return _refused(refusal)
        return web.Response(body=self._desk.encoded(), content_type="application/json")

    async def _healthz(self, _: web.Request) -> web.StreamResponse:
        return _state(self._desk.illness())

    async def _readyz(self, _: web.Request) -> web.StreamResponse:
        return _state(self._desk.illness() or self._desk.unready(), self._desk.standing())

    async def _events(self, request: web.Request) -> web.StreamResponse:
        refusal = self._desk.access.look_refusal(request.headers)
        if refusal is not None:
            return _refused(refusal)
        feed = self._desk.feed
        reader = feed.open(self._desk.page())
        if reader is None:
            return _text(f"{len(feed.readers)} browsers watch already: close one of them\n", 503)
        response = web.StreamResponse(headers={**HEADERS, "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        try:
            await response.prepare(request)
            await response.write(b"retry: 1000\n\n")
            while (message := await reader.next()) is not None:
                await asyncio.wait_for(response.write(message), WRITE_S)
        except asyncio.TimeoutError:
            _log.info("the dashboard cut off a browser at %s that read nothing for %g s", request.remote, WRITE_S)
            _cut(request)
        except ConnectionError:
            pass  # it was closed
        finally:
            feed.close(reader)
        return response

    # ------------------------------------------------------------ orders

    async def _order(self, request: web.Request) -> web.StreamResponse:
        refusal = self._desk.access.order_refusal(request.headers)
        if refusal is not None:
            return _refused(refusal)
        try:
            asked = json.loads(await request.read())
        except (ValueError, RecursionError):
            asked = None
        if not _is_order(asked):
            return _text('an order is {"room": ..., "replica": ..., "reason": ...}, three texts in JSON\n', 400)
        kill = request.path == "/kill"
        reason = asked["reason"] or "asked for on the dashboard"
        _log.info(
            "%s %s of %s by %s, on the dashboard: %s", "kill" if kill else "drain", asked["replica"], asked["room"],
            request.remote, reason,
        )  # fmt: skip
        try:
            told = await self._desk.order(kill=kill, room=asked["room"], replica=asked["replica"], reason=reason)
        except (FaultToleranceError, TimeoutError, asyncio.TimeoutError, RuntimeError) as error:
            return _text(f"the lighthouse did not take it: {str(error) or 'it does not answer'}\n", 503)
        if not told:
            return _text(f"{asked['replica']} has no lease in room {asked['room']}: nobody was told\n", 409)
        return web.Response(body=json.dumps({"told": told}).encode(), content_type="application/json")


def _is_order(asked: Any) -> bool:
    names = ("room", "replica", "reason")
    if not isinstance(asked, dict) or set(asked) != set(names):
        return False
    texts = [asked[name] for name in names]
    return all(isinstance(text, str) and len(text) <= TEXT_MAX for text in texts) and bool(texts[0] and texts[1])


def _text(text: str, status: int) -> web.Response:
    return web.Response(text=text, status=status)


def _state(wrong: str, right: str = "") -> web.Response:
    return _text(f"{wrong or ': '.join(filter(None, ('ok', right)))}\n", 503 if wrong else 200)


def _refused(refusal: Refusal) -> web.Response:
    response = _text(refusal.text + "\n", refusal.status)
    if refusal.status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="ft-training"'
    return response


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
