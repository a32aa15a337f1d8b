"""The page in a real browser: a job that loses a member, orders by keyboard, 320 pixels, dark, and foreign text."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from ft_core.dashboard import server as dashboards
from ft_core.dashboard.feed import Feed
from ft_core.protocol.types import Version
from tests.control.recorder import wait_until
from tests.control.test_pair import Two
from tests.launch.job import job

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.dashboard.browser import Browser, Page
    from tests.dashboard.here import Here

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
VERSION = Version(1, 1)
ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = "[...document.querySelectorAll('tr[data-id]')]"
TRAINING = f"{ROWS}.filter(row => row.querySelector('.state').textContent === 'training')"
STEP = "Number(document.querySelector('.figures div:nth-child(2) dd').textContent.replace(/,/g, ''))"
CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (text, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = c => c.map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (c !== 'rgba(0, 0, 0, 0)') return c;
    }
    return 'white';
  };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest('.skip, noscript')) continue;
    const style = getComputedStyle(e), back = behind(e);
    const color = e instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(rgb(color, back)), light(rgb(back, 'white'))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) poor.push(`${e.tagName}.${e.className} ${e.textContent.slice(0, 30)}`);
  }
  return poor;
})()
"""
"""Texts whose colour is too close to what is behind them (WCAG AA: 4.5 to 1)."""
PICTURES = os.environ.get("FT_PICTURES", "")
"""Folder for pictures of the page; '': none are kept."""


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.picture(pathlib.Path(PICTURES) / f"{name}.png")


def check_looks(page: Page) -> None:
    """At 320 pixels nothing is cut off, and all text is readable, in light and dark."""
    for dark in (False, True):
        for width in (1200, 320):
            page.looks(width, dark=dark)
            page.wait(f"document.querySelector('svg').viewBox.baseVal.width <= {width}")
            assert page.js("document.documentElement.scrollWidth") <= width
            assert page.js(CONTRAST) == []
            picture(page, f"{width}-{'dark' if dark else 'light'}")
    page.looks(1200)


def quiet(page: Page, base: str) -> None:
    """No script failed, and nothing was asked of anybody else."""
    page.js("1")
    assert page.complaints == []
    assert {urlsplit(one).netloc for one in page.requests if not one.startswith("data:")} == {urlsplit(base).netloc}


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[[], None]:
    """Ends the training of all workers, wherever they are."""
    path = tmp_path / "steps"
    surroundings = {"STEPS_FILE": str(path), "STEP_MS": "20", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)

    def end() -> None:
        partial = path.with_suffix(".tmp")
        partial.write_text("0")
        partial.rename(path)

    return end


def test_a_job_that_loses_a_member(end: Callable[[], None], browser: Browser, forged_workers: None) -> None:
    options = ("--replicas", "3", "--events", "off", "--http", "127.0.0.1:0")
    with job(ROOT / "tests/chaos/worker.py", *options, env={"FT_ADMIN_TOKEN": "admin"}) as running:
        found: dict[str, str] = {}

        def look(_: re.Match[str]) -> None:
            try:
                watch(browser, found["address"], int(found["pid"]))
            finally:
                end()

        running.when(r"dashboard: (http://\S+)", lambda line: found.update(address=line[1]))
        running.when(r"\[replica-1\] started \(pid (\d+)\)", lambda line: found.update(pid=line[1]))
        running.when(r"\] commit \d+ 3", look)
        assert running.run() == 0, running.text


def watch(browser: Browser, address: str, pid: int) -> None:
    page = browser.page(address)
    page.wait(f"{TRAINING}.length === 3")
    assert "3 members in quorum" in page.text()
    before = int(page.js("document.querySelector('.figures div:nth-child(2) dd').textContent.replace(/,/g, '')"))
    page.wait(
        f"Number(document.querySelector('.figures div:nth-child(2) dd').textContent.replace(/,/g, '')) > {before}"
    )
    lost = page.js(f"{ROWS}.find(row => row.textContent.startsWith('replica-1')).dataset.id")
    os.kill(pid, signal.SIGSTOP)
    page.wait(f"document.body.innerText.includes('lost {lost}: silent')")
    page.wait(f"{TRAINING}.length === 2 && document.body.innerText.includes('2 members in quorum')")
    picture(page, "lost")
    os.kill(pid, signal.SIGKILL)
    page.wait(f"{TRAINING}.length === 3 && document.body.innerText.includes('healed to step')", 60)
    assert page.js("document.title").startswith("3 at step")
    killed = page.js(f"{ROWS}.find(row => row.textContent.startsWith('replica-2')).dataset.id")
    page.js(f"document.querySelector('[aria-label=\"Kill {killed}\"]').click()")
    page.js("document.querySelector('#order-token').focus()")
    page.type("admin")
    page.key("Enter")
    page.wait(f"document.body.innerText.includes('{killed} was ordered to exit at once')")
    page.wait(f"{TRAINING}.length === 3 && !{ROWS}.some(row => row.dataset.id === '{killed}')", 60)
    assert page.js("document.querySelectorAll('figure .line').length") >= 2
    check_looks(page)
    quiet(page, address)


def test_what_is_shown_is_less_than_a_second_old(here: Here, browser: Browser) -> None:
    """A replica reports four times a second; five looks, of which a busy machine may spoil some."""
    one, _ = here.quorum("a:1", "b:1")
    page = browser.page(here.server.http_address())
    page.wait(f"{TRAINING}.length === 2")
    lags = []
    for step in range(100, 105):
        began = time.monotonic()
        one.lease.progress(step, "step", VERSION)
        page.wait(f"{STEP} === {step}")
        lags.append(time.monotonic() - began)
    assert min(lags) < 1.0, lags
    quiet(page, here.server.http_address())


def test_orders_by_keyboard_alone(here: Here, browser: Browser) -> None:
    one, two = here.quorum("a:1", "b:1")
    page = browser.page(here.server.http_address())
    page.wait(f"{TRAINING}.length === 2")
    focus = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    for _ in range(40):
        page.key("Tab")
        if page.js(focus) == "Drain b:1":
            break
    assert page.js(focus) == "Drain b:1", "every button is reached with Tab"
    page.key("Enter")
    page.wait("document.querySelector('#order').open")
    assert page.js(focus) == "Cancel", "Enter, pressed twice, orders nothing"
    assert page.js(CONTRAST) == []
    picture(page, "order")
    page.key("Enter")
    page.wait("!document.querySelector('#order').open")
    assert page.js(focus) == "Drain b:1", "and the focus is where it was"
    page.key("Enter")
    page.key("Escape")
    page.wait("!document.querySelector('#order').open")
    page.key("Enter")
    page.wait("document.querySelector('#order').open")
    page.js("document.querySelector('#order-token').focus()")
    page.type("not the token")
    page.key("Enter")
    page.wait("document.querySelector('#order-error').textContent.includes('the admin token is wrong')")
    assert two.recorder.of("drain") == []
    page.js("document.querySelector('#order-token').value = 'adm\u00efn\u2014'")
    page.js("document.querySelector('#order-yes').click()")
    page.wait("document.querySelector('#order-error').textContent.includes('characters that no token has')")
    page.js("document.querySelector('#order-token').value = ''")
    page.js("document.querySelector('#order-token').focus()")
    page.type("admin")
    page.js("document.querySelector('#order-reason').focus()")
    page.type("new disks")
    page.key("Enter")
    page.wait("document.querySelector('#result').textContent.includes('b:1 was ordered to drain')")
    assert two.recorder.wait("drain") == ("new disks",)
    assert one.recorder.of("drain") == []
    page.wait("document.body.innerText.includes('b:1 was ordered to drain: new disks')")


def test_an_order_that_is_answered_late_leaves_the_next_one_alone(here: Here, browser: Browser) -> None:
    here.quorum("a:1", "b:1")
    page = browser.page(here.server.http_address())
    page.wait(f"{TRAINING}.length === 2")
    page.js(
        "{ const ask = window.fetch; window.fetch = (to, how) => how.method !== 'POST' ? ask(to, how)"
        " : new Promise(done => { window.answer = () => done(ask(to, how)); }); }"
    )
    for name in ("a:1", "b:1"):
        page.js(f"document.querySelector('[aria-label=\"Kill {name}\"]').click()")
        page.js("document.querySelector('#order-token').value = 'wrong'")
        if name == "a:1":
            page.js("document.querySelector('#order-yes').click()")
            page.wait("Boolean(window.answer)")
            page.js("document.querySelector('#order-no').click()")
            page.wait("!document.querySelector('#order').open")
    page.js("window.answer()")
    page.wait("document.querySelector('#result').textContent.includes('a:1 was not ordered to exit: the admin token')")
    assert page.js("document.querySelector('#order').open")
    assert page.js("document.querySelector('#order-title').textContent") == "Kill b:1?"
    assert page.js("document.querySelector('#order-error').textContent") == ""


def test_names_and_reasons_are_text(here: Here, browser: Browser) -> None:
    name = "<img src=x onerror=alert(1)>:1"
    (one,) = here.quorum(name)
    page = browser.page(here.server.http_address())
    page.wait(f"{TRAINING}.length === 1")
    one.lease.leave(
        "<script>document.title = 'gone wrong'</script>", finished=False, version=VERSION, agreed=True, timeout_s=5
    )
    page.wait("document.body.innerText.includes('gone wrong')")
    assert page.js("document.querySelectorAll('main img, main script').length") == 0
    assert name.rpartition(":")[0] in page.text()
    quiet(page, here.server.http_address())


@pytest.mark.parametrize("width", [320, 800, 1200])
def test_numbers_stay_whole_beside_a_long_name(here: Here, browser: Browser, width: int) -> None:
    (one,) = here.quorum("r" * 120 + ":1")
    page = browser.page(here.server.http_address(), width)
    page.wait(f"{TRAINING}.length === 1")
    one.lease.progress(1_000_003, "step", VERSION)
    page.wait("document.body.innerText.includes('1,000,003')")
    broken = """[...document.querySelectorAll('td.num, th')].filter(cell => {
      const range = document.createRange();
      let inner = cell;
      while (inner.firstElementChild) inner = inner.firstElementChild;
      range.selectNodeContents(inner);
      return new Set([...range.getClientRects()].filter(r => r.width > 1).map(r => Math.round(r.top))).size > 1;
    }).map(cell => cell.textContent)"""
    assert page.js(broken) == []
    assert page.js("document.documentElement.scrollWidth <= innerWidth")


def test_a_lighthouse_that_ends_and_returns(start: Callable[..., Here], browser: Browser) -> None:
    here = start()
    here.quorum("a:1")
    page = browser.page(here.server.http_address())
    page.wait(f"{TRAINING}.length === 1")
    here.close()
    page.wait("document.querySelector('#news.late')?.textContent.includes('No news for')")
    assert "What is shown is as of" in page.text()
    again = start(http=f"127.0.0.1:{here.port}")
    again.quorum("z:1")
    page.wait("document.body.innerText.includes('z:1 connected') && !document.querySelector('#news.late')")
    assert page.js(f"{ROWS}.map(row => row.dataset.id).join()") == "z:1"


def test_each_of_two_lighthouses_says_what_it_does(browser: Browser) -> None:
    two = Two(http="127.0.0.1:0")
    try:
        servers = two.begin(0), two.begin(1)
        index = two.settled()
        active, standby = (browser.page(servers[i].http_address()) for i in (index, 1 - index))
        there = two.addresses[index]
        standby.wait(f"document.querySelector('#pair')?.textContent.includes('stands by for {there}')")
        standby.wait("document.querySelector('#news').textContent === 'Live.'")
        assert "its records are complete" in standby.text()
        assert "No replica has connected" not in standby.text(), "they are not to connect here"
        active.wait(f"document.querySelector('#pair')?.textContent.includes('{two.addresses[1 - index]} stands by')")
        picture(standby, "stands-by")
        picture(active, "active")
        two.end(index)
        standby.wait("document.querySelector('#pair.alert')?.textContent.includes('Nobody stands by')")
        assert f"since it took the place of {there}" in standby.text()
        picture(standby, "nobody-stands-by")
        assert standby.js("document.documentElement.scrollWidth <= innerWidth")
    finally:
        two.close()


def test_many_replicas_can_be_filtered(here: Here, browser: Browser) -> None:
    names = [f"r{number}:1" for number in range(14)]
    here.quorum(*names)
    page = browser.page(here.server.http_address())
    page.wait(f"{TRAINING}.length === 14")
    page.js("document.querySelector('input.filter').focus()")
    page.type("r13")
    page.wait(f"{ROWS}.length === 1")
    page.wait("document.body.innerText.includes('14 training')")


def test_a_token_is_asked_for_where_one_is_needed(start: Callable[..., Here], browser: Browser) -> None:
    here = start(http="0.0.0.0:0")
    here.host = "127.0.0.1"
    here.quorum("a:1")
    page = browser.page(f"http://127.0.0.1:{here.port}/")
    page.wait("!document.querySelector('#login').hidden && document.activeElement.id === 'token'")
    page.type("wrong")
    page.key("Enter")
    page.wait("document.querySelector('#login-error').textContent === 'This is not the token.'")
    page.type("j\u00f6b\u2014")  # no header can carry it
    page.key("Enter")
    page.wait("document.querySelector('#login-error').textContent.includes('characters that no token has')")
    page.type("job")
    page.key("Enter")
    page.wait(f"{TRAINING}.length === 1")
    assert page.js("document.querySelector('#login').hidden")
    assert not any("job" in one for one in page.requests), "it never is in an address"
    assert page.js("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])") == '[{},{},""]'


def test_messages_that_come_at_once_are_drawn_once(here: Here, browser: Browser) -> None:
    """A page that nobody sees gets no frames, so it draws nothing, and the newest when it is seen again."""
    one, _ = here.quorum("a:1", "b:1")
    page = browser.page(here.server.http_address())
    page.wait(f"{TRAINING}.length === 2")
    page.js("window.later = []; window.requestAnimationFrame = work => later.push(work)")
    one.lease.progress(77, "step", VERSION)
    wait_until(lambda: here.room()["step"] == 77)
    sent = here.room()["fine"][-1][0]
    wait_until(lambda: here.room()["fine"][-1][0] > sent + 2)
    page.wait("later.length === 1")
    assert page.js(STEP) == 0
    page.js("later[0]()")
    assert page.js(STEP) == 77


def test_a_page_that_stays_open_does_not_grow(
    start: Callable[..., Here], browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of several minutes, sent as fast as a frame takes them."""
    published: list[float] = []
    publish = Feed.publish

    def counted(self: Feed, page: dict[str, Any]) -> None:
        published.append(page["at"])
        publish(self, page)

    monkeypatch.setattr(Feed, "publish", counted)
    monkeypatch.setattr(dashboards, "SHARE", 1.0)
    here = start()
    one, _ = here.quorum("a:1", "b:1")
    page = browser.page(here.server.http_address())
    page.wait(f"{TRAINING}.length === 2")

    def used(messages: int) -> tuple[int, int]:
        """Bytes and nodes of the page, after so many messages more, when none of them is on its way any more."""
        until = len(published) + messages
        with monkeypatch.context() as fast:
            fast.setattr(dashboards, "TICK_S", 0.01)
            wait_until(lambda: len(published) > until, 60)
        one.lease.progress(until, "step", VERSION)
        page.wait(f"{STEP} === {until}")
        page.call("HeapProfiler.collectGarbage")
        return page.call("Runtime.getHeapUsage")["usedSize"], page.call("Memory.getDOMCounters")["nodes"]

    bytes_before, nodes_before = used(200)
    bytes_after, nodes_after = used(600)
    assert bytes_after - bytes_before < 500_000
    assert nodes_after - nodes_before < 200
    quiet(page, here.server.http_address())
