"""What ftrun believes of a group: never a run that has ended, whatever the lighthouse still believes of it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ft_core._pb import coordination_pb2 as pb
from ft_core.control.lighthouse.server import LighthouseServer
from ft_core.errors import LighthouseError
from ft_core.launch.lighthouse_watch import CALL_S, FACTS_S, MAX_OVER, SILENT_S, Watch
from ft_core.launch.picture import OLD_S, Picture
from ft_core.launch.supervisor import STATUS_S
from ft_core.rpc.channel import CLIENT_KEEPALIVE_S, CLIENT_KEEPALIVE_TIMEOUT_S
from tests.control.processes import Child, start_lighthouse
from tests.control.recorder import wait_until

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

ROOM = "default"


class Stream:
    """Nothing changes, so nothing arrives."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def __iter__(self) -> Iterator[pb.StatusResponse]:
        self._ended.wait(30)
        return iter(())

    def cancel(self) -> None:
        self._ended.set()


class Lighthouse:
    """Answers a status; takes the place of the client."""

    def __init__(self) -> None:
        self.lives: dict[str, str] = {}
        self.slow_s = 0.0
        self.away = False
        self.asked: frozenset[str] = frozenset()
        self.room = ROOM
        self.active = "here:1"
        self.ended: list[tuple[str, float]] = []
        """Reports of an end that were taken, or not: and when."""
        self.knows = True
        self.uptime_ms = 0
        self.given_up: dict[str, list[str]] = {ROOM: []}
        """Names by room."""

    def status(self, _timeout: object, names: Collection[str] = ()) -> pb.StatusResponse:
        self.asked = frozenset(names)
        threading.Event().wait(self.slow_s)
        if self.away:
            raise LighthouseError("no answer")
        replicas = [pb.ReplicaStatus(replica_id=key, life=life) for key, life in sorted(self.lives.items())]
        rooms = [pb.RoomStatus(room=ROOM, replicas=replicas, given_up=names) for names in self.given_up.values()]
        return pb.StatusResponse(rooms=rooms, uptime_ms=self.uptime_ms)

    def watch(self, _names: Collection[str] = ()) -> Stream:
        return Stream()

    def report_ended(self, name: str, _timeout: object) -> bool:
        self.ended.append((name, time.monotonic()))
        if self.away:
            raise LighthouseError("standby: and the other is gone")
        return self.knows

    def report_given_up(self, name: str, _reason: str, _timeout: object) -> None:
        self.given_up.setdefault(self.room, []).append(name)

    def close(self) -> None: ...


@pytest.fixture
def lighthouse() -> Lighthouse:
    return Lighthouse()


@pytest.fixture
def watch(lighthouse: Lighthouse) -> Watch:
    made = Watch("nowhere:1", "", lambda: None, lambda name: None)
    made._client = lighthouse  # type: ignore[assignment]
    made.start()
    return made


def test_a_killed_process_that_is_believed_silent_is_not_taken_for_its_successor(
    watch: Watch, lighthouse: Lighthouse
) -> None:
    """Else its silence would be taken for a hang of the new one, which would be killed for it."""
    lighthouse.lives["a:1"] = "missed"
    assert watch.facts("a").known
    lighthouse.lives["a:2"] = "up"
    watch.facts("another")  # a new picture
    seen = watch.now("a")
    watch.close()
    assert seen is not None
    assert (seen.replica_id, seen.stalled) == ("a:2", "")


def test_a_frozen_process_that_has_not_ended_stands_still(watch: Watch, lighthouse: Lighthouse) -> None:
    lighthouse.lives["a:1"] = "missed"
    watch.facts("another")
    seen = watch.now("a")
    watch.close()
    assert seen is not None
    assert "has not heard of it" in seen.stalled


def test_the_oldest_runs_are_forgotten_first(watch: Watch, lighthouse: Lighthouse) -> None:
    for number in range(MAX_OVER + 1):
        lighthouse.lives = {f"a:{number}": "up"}
        assert watch.facts("a").known
    lighthouse.lives = {f"a:{MAX_OVER}": "up"}
    assert not watch.facts("a").known
    watch.close()


def test_a_lighthouse_that_is_slow_is_not_taken_for_one_that_is_away(watch: Watch, lighthouse: Lighthouse) -> None:
    """Else a failure on an overloaded machine would cost no budget, and its run would pass for its successor."""
    lighthouse.lives["a:1"] = "missed"
    lighthouse.slow_s = CALL_S.total_seconds() * 0.6
    facts = watch.facts("a")
    seen = watch.now("a")
    watch.close()
    assert facts.reachable
    assert facts.known
    assert seen is None


def test_a_lighthouse_that_is_away_is_not_waited_for(watch: Watch, lighthouse: Lighthouse) -> None:
    lighthouse.away = True
    began = time.monotonic()
    facts = watch.facts("a")
    took = time.monotonic() - began
    watch.close()
    assert not facts.reachable
    assert not facts.known
    assert took < FACTS_S / 2


def test_a_lighthouse_that_has_forgotten_who_was_given_up_is_told_again(watch: Watch, lighthouse: Lighthouse) -> None:
    watch.gave_up("a", "died 3 times in a row before its first commit")
    watch.facts("b")
    watch.facts("b")
    assert lighthouse.given_up == {ROOM: ["a"]}, "told once"
    lighthouse.given_up = {}  # it was restarted: there is no room yet
    watch.facts("b")
    watch.facts("b")
    assert lighthouse.given_up == {ROOM: ["a"]}
    watch.starts("a")
    lighthouse.given_up = {ROOM: []}
    watch.facts("b")
    watch.close()
    assert lighthouse.given_up == {ROOM: []}, "it is started after all"


def test_only_the_groups_that_were_started_here_are_asked_for(watch: Watch, lighthouse: Lighthouse) -> None:
    watch.facts("a")
    assert lighthouse.asked == frozenset()
    for name in ("a", "b"):
        watch.starts(name)
    watch.facts("a")
    watch.close()
    assert lighthouse.asked == {"a", "b"}


def test_the_end_of_a_group_is_reported_until_a_lighthouse_knows_it(watch: Watch, lighthouse: Lighthouse) -> None:
    """One that becomes active when the other one dies together with the group learns of the members after that."""
    lighthouse.away, lighthouse.knows = True, False
    watch.ended("a")
    wait_until(lambda: len(lighthouse.ended) >= 2)
    lighthouse.away = False
    reported = len(lighthouse.ended)
    wait_until(lambda: len(lighthouse.ended) > reported)
    lighthouse.knows = True
    reported = len(lighthouse.ended)
    wait_until(lambda: len(lighthouse.ended) > reported)
    watch.facts("b")
    reported = len(lighthouse.ended)
    watch.ended("c")
    lighthouse.knows = False
    watch.ended("d")  # never held a lease
    watch.facts("b")
    watch.close()
    assert [name for name, _ in lighthouse.ended[reported:]] == ["c", "d"], "those were taken at once"


def test_a_picture_of_the_other_lighthouse_is_not_an_old_one(watch: Watch, lighthouse: Lighthouse) -> None:
    """They were started together; the one that took over a second later."""
    lighthouse.uptime_ms, lighthouse.lives["a:1"] = 100_000, "up"
    assert watch.facts("a").known
    lighthouse.uptime_ms, lighthouse.lives = 99_000, {"a:2": "up"}
    assert not watch.facts("a").reachable, "an answer that was overtaken"
    lighthouse.active = "there:1"
    facts = watch.facts("a")
    watch.close()
    assert facts.reachable
    assert facts.known


# ------------------------------------------------------------ a lighthouse that is frozen


@pytest.mark.parametrize(
    ("age_s", "total", "reason", "title"),
    [
        (0.5, 4, "", "3 of 4 groups in the quorum"),
        (OLD_S - 0.1, 0, "a is missing", "3 groups in the quorum: a is missing"),
        (1.6, 4, "", "3 of 4 groups in the quorum (2 s ago; the lighthouse has not answered since)"),
        (
            11.6,
            0,
            "a is missing",
            "3 groups in the quorum: a is missing (12 s ago; the lighthouse has not answered since)",
        ),
    ],
)
def test_a_picture_that_is_old_says_so(age_s: float, total: int, reason: str, title: str) -> None:
    assert Picture(100.0, members=3, reason=reason).title(total, 100.0 + age_s) == title
    assert OLD_S + STATUS_S < 2.0, "it is shown within two seconds"


def test_before_the_first_picture_there_is_no_age() -> None:
    assert Picture().title(2, 1e6) == "0 of 2 groups in the quorum"


@pytest.mark.process
def test_pictures_follow_the_one_that_is_active_while_the_other_is_frozen(lighthouses: tuple[Child, str, str]) -> None:
    """It ends no stream; without a look the next picture came when the kernel gave its connection up, after 12 s."""
    process, first, second = lighthouses
    watch = Watch(f"{first},{second}", "", lambda: None, lambda name: None)
    watch.connect(timedelta(seconds=10))
    watch.start()
    wait_until(lambda: watch.look().at > 0)
    assert watch._client.active == first
    process.stop()
    frozen = time.monotonic()
    try:
        wait_until(lambda: watch._client.active == second and watch.look().at > frozen + SILENT_S)
        assert time.monotonic() - frozen < 0.7 * (CLIENT_KEEPALIVE_S + CLIENT_KEEPALIVE_TIMEOUT_S)
    finally:
        watch.close()


@pytest.fixture
def lighthouses() -> Iterator[tuple[Child, str, str]]:
    """A process, its address, and that of another one."""
    made: list[Child] = []

    def child(*arguments: str, **more: object) -> Child:
        made.append(Child(*arguments, **more))
        return made[-1]

    other = LighthouseServer("127.0.0.1:0", token="")
    process, address = start_lighthouse(child, "--bind", "127.0.0.1:0", "--http", "off")
    yield process, address, other.address()
    other.shutdown()
    process.end()


# ------------------------------------------------------------ mistakes of ours


def test_a_mistake_in_what_arrives_is_said_and_what_follows_is_read(
    lighthouse: Lighthouse, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thread that reads would end silently, and every picture from then on would be the old one."""
    streams: list[Stream] = []

    def watch(_names: Collection[str] = ()) -> Stream:
        if not streams and "what the lighthouse sends" not in caplog.text:
            raise ValueError("no picture")
        streams.append(Stream())
        return streams[-1]

    monkeypatch.setattr(lighthouse, "watch", watch)
    made = Watch("nowhere:1", "", lambda: None, lambda name: None)
    made._client = lighthouse  # type: ignore[assignment]
    made.start()
    wait_until(lambda: bool(streams))
    made.close()
    assert "a mistake of ftrun's own" in caplog.text
    assert "ValueError: no picture" in caplog.text


def test_a_mistake_in_an_order_is_said_and_the_next_one_is_carried_out(
    lighthouse: Lighthouse, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that could not be told to drain is signalled; the end of the next one is reported."""
    undrained: list[str] = []

    def drain(_name: str, _reason: str) -> list[str]:
        raise ValueError("no order")

    monkeypatch.setattr(lighthouse, "drain", drain, raising=False)
    made = Watch("nowhere:1", "", lambda: None, undrained.append)
    made._client = lighthouse  # type: ignore[assignment]
    made.start()
    made.drain("a", "the test")
    made.ended("b")
    wait_until(lambda: bool(lighthouse.ended))
    made.close()
    assert undrained == ["a"]
    assert "ValueError: no order" in caplog.text
