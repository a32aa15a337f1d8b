"""A real headless Chromium, driven over its own protocol (Chrome DevTools): what the tests of the page look with.

How it works. `Browser` starts the process with a folder of its own and a port that it chooses; `Page` holds one tab's
websocket. Calls are synchronous: each runs the event loop of the browser until its answer is there. Conditions are
waited for inside the page (`Page.wait`), frame by frame.

Invariants: `close` ends the process and everything it started; every call ends after CALL_S.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    Socket = aiohttp.ClientWebSocketResponse[Any]

WAIT_S = 30.0
"""How long a condition may take to come true."""
CALL_S = 90.0
PR_SET_PDEATHSIG = 1
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "Space": 32}


def chromium() -> str:
    """Where it is; '': it is not installed."""
    return shutil.which(os.environ.get("FT_CHROMIUM", "")) or shutil.which("chromium") or shutil.which("chrome") or ""


def _end_with_this_process() -> None:
    """Though it may be killed before it can `close`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Browser:
    """One process of Chromium."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._folder = folder
        self._process = subprocess.Popen(
            [
                chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync",
                "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=_end_with_this_process,
        )  # fmt: skip
        self._session: aiohttp.ClientSession | None = None
        self._pages: list[Page] = []

    def __repr__(self) -> str:
        return f"Browser(pid={self._process.pid}, {len(self._pages)} pages)"

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine returns, within CALL_S."""
        return self._loop.run_until_complete(asyncio.wait_for(work, CALL_S))

    def page(self, url: str, width: int = 1200, height: int = 900, *, dark: bool = False) -> Page:
        """A tab that has opened this address."""
        page = Page(self, self.run(self._connect()))
        self._pages.append(page)
        for what in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{what}.enable")
        page.looks(width, height, dark=dark)
        page.call("Page.navigate", url=url)
        return page

    async def _connect(self) -> Socket:
        port_file = self._folder / "DevToolsActivePort"
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self._process.poll() is None, "Chromium has ended"
            await asyncio.sleep(0.02)
        self._session = self._session or aiohttp.ClientSession()
        base = f"http://127.0.0.1:{port_file.read_text().split()[0]}"
        async with self._session.put(f"{base}/json/new?about:blank") as answer:
            target = await answer.json()
        return await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 << 20)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._session is not None:
            self.run(self._session.close())
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, socket: Socket) -> None:
        self._browser, self._socket = browser, socket
        self._sent = 0
        self.complaints: list[str] = []
        """Errors that the page's scripts raised, or the browser logged."""
        self.requests: list[str] = []
        """Addresses that were asked for."""

    def call(self, method: str, **more: Any) -> Any:
        """Call a method of the protocol."""
        self._sent += 1
        return self._browser.run(self._call(self._sent, method, more))

    async def _call(self, number: int, method: str, more: dict[str, Any]) -> Any:
        await self._socket.send_json({"id": number, "method": method, "params": more})
        while True:
            received = json.loads((await self._socket.receive()).data)
            if received.get("id") == number:
                assert "error" not in received, f"{method}: {received['error']}"
                return received["result"]
            self._noted(received.get("method"), received.get("params", {}))

    def _noted(self, method: str | None, what: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(what["exceptionDetails"])[:1000])
        elif method == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.complaints.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])

    def js(self, code: str) -> Any:
        """The value of an expression in the page, or of its promise."""
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, timeout_s: float = WAIT_S) -> Any:
        """The first true value of an expression."""
        found = self.js(
            f"""new Promise(done => {{
              const until = performance.now() + {timeout_s * 1000};
              const look = () => {{
                let value = null;
                try {{ value = {condition}; }} catch {{ }}
                if (value) done(value);
                else if (performance.now() > until) done(null);
                else setTimeout(look, 15);
              }};
              look();
            }})"""
        )
        assert found, f"{condition} did not come true; the page says:\n{self.text()}\n{self.complaints}"
        return found

    def text(self) -> str:
        """What it says."""
        return str(self.js("document.body.innerText"))

    def looks(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Change its size, and the user's preference for dark pages."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def key(self, name: str) -> None:
        """Press and release a key."""
        code = KEYS[name]
        text = {"Enter": "\r", "Space": " "}.get(name)
        more = {"key": " " if name == "Space" else name, "code": name, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **more, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def type(self, text: str) -> None:
        """Write where the focus is."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Save what the whole page looks like."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))
