"""Donors for the tests: in this process, and as real processes that can be killed."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ft_core.checkpointing import StateServer
from tests.descriptors import descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20


def heal_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("ft-heal"))


def make_state(seed: int = 0, mib: int = 24) -> dict[str, Any]:
    """Some large leaves, many small ones, and values that are not tensors."""
    g = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randint(0, 255, (mib * MIB + 12_345,), dtype=torch.uint8, generator=g),
        "medium": torch.randn(70_000, generator=g),
        "small": {f"p{i}": torch.randn(100, generator=g) for i in range(50)},
        "tied": [],
        "step": seed,
        "name": "model",
    }


def assert_same_state(a: Any, b: Any) -> None:
    assert torch.equal(a["big"], b["big"])
    assert torch.equal(a["medium"], b["medium"])
    assert a["small"].keys() == b["small"].keys()
    assert all(torch.equal(a["small"][k], b["small"][k]) for k in a["small"])
    assert (a["step"], a["name"]) == (b["step"], b["name"])


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every test must leave the process as it found it."""
    before = descriptors()
    yield
    assert heal_threads() == []
    assert {fd for fd in descriptors() - before if "socket" in fd} == set()


@pytest.fixture
def donor() -> Iterator[Callable[..., StateServer]]:
    """Start a StateServer on loopback; all are shut down after the test."""
    servers: list[StateServer] = []

    def start(token: str | None = None, cls: type[StateServer] = StateServer) -> StateServer:
        server = cls(token, bind="127.0.0.1").start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()


class Trainer:
    """Stands for a training thread: at every step boundary it answers `snapshot_wanted`, then changes its state."""

    def __init__(self, server: StateServer, state: Any, step: Callable[[], None] = lambda: None) -> None:
        self._server, self._state, self._step = server, state, step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(0.0005):  # the step's own time
            if self._server.snapshot_wanted:
                self._server.offer_live(self._state)
            self._step()


class Gate:
    """Stops the first send of a range in the middle until `resume` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ft_core.checkpointing.http.byte_stream import ByteStream

        self.reached, self.resume = threading.Event(), threading.Event()
        original = ByteStream.send

        def gated(stream: ByteStream, pieces: list[Any]) -> None:
            if len(pieces[-1]) < MIB or self.reached.is_set():
                return original(stream, pieces)
            self.reached.set()
            body = memoryview(pieces[-1])
            half = len(body) // 2
            original(stream, [*pieces[:-1], body[:half]])
            assert self.resume.wait(20)
            return original(stream, [body[half:]])

        monkeypatch.setattr(ByteStream, "send", gated)


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor() as executor:
        yield executor


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.resume.set()
