"""Several ranks of one group: in threads of this process, or in real processes that can be killed.

Processes are forked from a clean server process that has torch imported (20 ms each instead of 1.5 s). A worker holds
named process groups and does what it is told over a pipe, one call after the other: `worker.call(function, ...)` for
the answer, `worker.start(...)` and `worker.answer()` to let several run at once.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ft_core.process_group import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo, open_store
from ft_core.process_group import reaper as reaping
from tests.process_group.fake_communicator import FakeNCCL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
ANSWER_S = 60.0
GROUP_TIMEOUT = timedelta(seconds=20)
AT_ONCE_S = 2.0
"""Far below any timeout here (10 s and more). Measured: 1 to 50 ms alone; up to 0.4 s beside the other tests of
scripts/test, at a load of 28 on two cores."""


KINDS: dict[str, Callable[[timedelta], ProcessGroup]] = {"gloo": ProcessGroupGloo, "nccl": FakeNCCL}
"""The kinds of group that keep the base class's contract on CPU tensors, each by its name."""


class Store:
    """A TCPStore server in this process that hands out fresh prefixes."""

    def __init__(self) -> None:
        self.server = open_store("127.0.0.1")
        self._count = 0

    def fresh(self) -> str:
        self._count += 1
        return f"127.0.0.1:{self.server.port}/test/{self._count}"


def in_threads(count: int, do: Callable[[int], T]) -> list[T]:
    """Run `do(rank)` for each rank at once; raises the first error."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = do(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_S)
        assert not thread.is_alive(), "a rank is stuck"
    if errors:
        raise errors[0]
    return results


def configure_all(groups: list[Any], store_addr: str) -> None:
    in_threads(len(groups), lambda rank: groups[rank].configure(store_addr, f"replica{rank}", rank, len(groups)))


Kind = type[ProcessGroupGloo] | type[ProcessGroupBabyGloo]
HOST_KINDS: list[Kind] = [ProcessGroupGloo, ProcessGroupBabyGloo]
"""Those that keep the whole contract, with the same words in their errors."""


@functools.cache
def start_helper() -> None:
    """The first group in a child waits for a process that imports torch: so long no rank of a test should wait."""
    group = ProcessGroupBabyGloo(GROUP_TIMEOUT)
    group.configure("", "first", 0, 1)
    group.shutdown()


@contextlib.contextmanager
def formed_groups(kind: Kind, count: int, store: Store, timeout: timedelta = GROUP_TIMEOUT) -> Iterator[list[Any]]:
    if kind is ProcessGroupBabyGloo:
        start_helper()
    groups = [kind(timeout) for _ in range(count)]
    try:
        configure_all(groups, store.fresh())
        yield groups
    finally:
        for group in groups:
            group.shutdown()


ALL_KINDS: dict[str, Callable[[timedelta], ProcessGroup]] = {**KINDS, "baby-gloo": ProcessGroupBabyGloo}
"""Also those whose errors have other words."""


def group_of(kind: str, timeout: timedelta = GROUP_TIMEOUT) -> ProcessGroup:
    """An unconfigured group of a kind in ALL_KINDS."""
    if kind == "baby-gloo":
        start_helper()
    return ALL_KINDS[kind](timeout)


@contextlib.contextmanager
def groups_of(kind: str, count: int, store: Store, timeout: timedelta = GROUP_TIMEOUT) -> Iterator[list[ProcessGroup]]:
    """Formed groups of a kind in ALL_KINDS, one per rank."""
    groups = [group_of(kind, timeout) for _ in range(count)]
    try:
        configure_all(groups, store.fresh())
        yield groups
    finally:
        for group in groups:
            group.shutdown()


def nothing_is_left(timeout_s: float = 5.0) -> bool:
    """Wait until all groups that were ended are released; whether that came true."""
    return reaping.gloo.wait_empty(timeout_s) and reaping.device.wait_empty(timeout_s)


@contextlib.contextmanager
def gloo_groups(count: int, store: Store, timeout: timedelta = GROUP_TIMEOUT) -> Iterator[list[ProcessGroupGloo]]:
    with formed_groups(ProcessGroupGloo, count, store, timeout) as groups:
        yield groups


_lost = reaping.Reaper("lost")


def set_aside_lost_groups() -> None:
    """Groups that tests broke on purpose and that Gloo cannot end before their timeout: not counted any more.

    A later test that waits until nothing is left would wait for them, too. They are destroyed when they can be.
    """
    reaping.gloo.wait_empty(1.0)
    _lost.start()
    with reaping.gloo._destroying:
        for group in reaping.gloo._held:
            _lost.retire(group)
        reaping.gloo._held = []


def wait_until(true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Poll for what has no event to wait on; whether it came true."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


# --------------------------------------------------------------------------------------------------------- in a worker

_groups: dict[str, Any] = {}
_kind: Kind = ProcessGroupGloo
_works: dict[str, Any] = {}
_kept: list[Any] = []


def use(kind: str) -> None:
    """Make groups of this kind from now on, by the name of its class."""
    global _kind
    _kind = next(each for each in HOST_KINDS if each.__name__ == kind)


def _group(name: str) -> Any:
    if name not in _groups:
        _groups[name] = _kind(GROUP_TIMEOUT)
    return _groups[name]


def configure(name: str, store_addr: str, rank: int, world_size: int) -> float:
    group = _group(name)
    begin = time.perf_counter()
    group.configure(store_addr, f"replica{rank}", rank, world_size)
    group.allreduce([torch.ones(4)]).wait()
    return time.perf_counter() - begin


def configure_only(name: str, store_addr: str, rank: int, world_size: int) -> None:
    _group(name).configure(store_addr, f"replica{rank}", rank, world_size)


def allreduce(name: str, numel: int = 4) -> float:
    tensor = torch.ones(numel)
    _groups[name].allreduce([tensor]).wait()
    return float(tensor[0])


def launch(name: str, numel: int = 1000) -> None:
    _works[name] = _groups[name].allreduce([torch.ones(numel)])


def wait_for_failure(name: str) -> tuple[float, str]:
    """Wait for the launched work to fail: when (the system-wide monotonic clock), and how."""
    try:
        _works[name].wait()
    except RuntimeError as error:
        return time.monotonic(), type(error).__name__
    return time.monotonic(), "no error"


def abort(name: str) -> tuple[float, float]:
    """Abort; when it began and how long it took."""
    begin = time.monotonic()
    _groups[name].abort()
    return begin, time.monotonic() - begin


def errored(name: str) -> str:
    return type(_groups[name].errored()).__name__


def fork_idle_child() -> int:
    """Fork a child that does nothing until the test kills it, as a DataLoader worker between two batches; its pid."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"x")  # the at-fork handlers have run
        signal.pause()
        os._exit(0)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    return pid


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            do, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, do(*arguments)))
        except Exception as error:  # noqa: BLE001 - shown by the test
            pipe.send((False, repr(error)))


# -------------------------------------------------------------------------------------------------------- in the test


class Worker:
    """A real process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.process_group.ranks"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid
        assert self.pid is not None

    def start(self, do: Callable[..., Any], *arguments: Any) -> None:
        self._pipe.send((do, arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        assert self._pipe.poll(timeout_s), "the worker does not answer"
        good, value = self._pipe.recv()
        assert good, value
        return value

    def call(self, do: Callable[..., Any], *arguments: Any) -> Any:
        self.start(do, *arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def status(self, timeout_s: float) -> int | None:
        """Wait for its end; its exit code."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def end(self) -> None:
        self._process.kill()
        self._process.join(5)
        self._pipe.close()


@contextlib.contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    started: list[Worker] = []
    try:
        started.extend(Worker() for _ in range(count))
        yield started
    finally:
        for worker in started:
            worker.end()


def call_all(ranks: list[Worker], do: Callable[..., Any], argument: Callable[[int], tuple[Any, ...]]) -> list[Any]:
    """Run `do(*argument(i))` in all at once and return the answers."""
    for index, worker in enumerate(ranks):
        worker.start(do, *argument(index))
    return [worker.answer() for worker in ranks]


def start_all(ranks: list[Worker], do: Callable[..., Any], *arguments: Any) -> list[Worker]:
    """Start `do(*arguments)` in all and return them, to be asked for their answers."""
    for worker in ranks:
        worker.start(do, *arguments)
    return ranks


def configure_workers(ranks: list[Worker], name: str, store_addr: str) -> None:
    """Form the group `name` of all workers."""
    call_all(ranks, configure, lambda rank: (name, store_addr, rank, len(ranks)))
