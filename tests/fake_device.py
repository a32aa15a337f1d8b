"""A device whose memory is CPU memory that nobody may look at: what `ft_core.checkpointing.devices` needs of CUDA.

It does nothing by itself. What is launched waits until the test lets it happen (`run`), or a thread does where a test
asks for that (`running`), after a moment, so that who does not wait is found out. There are two streams: training's,
and one for copies, which comes first whenever what its next copy waits for has happened, so that a copy that waits for
nothing overtakes all that was launched before it. Copies can fail or hang. What must not be is recorded in `broken`:
memory that is not pinned, copies of unlike sizes.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from ft_core.checkpointing import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest


class FakeMark:
    """Reached when the device gets there; then, if it is to fail, asking raises."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.reached = threading.Event()
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        if self.reached.is_set() and self.error is not None:
            raise self.error
        return self.reached.is_set()


class FakeDevice:
    """One device."""

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self.pinned_storages: set[int] = set()
        self.kept: list[torch.Tensor] = []
        self.training: list[tuple[Callable[[], None], FakeMark]] = []
        self.copying: list[tuple[Callable[[], None], FakeMark, FakeMark | None]] = []
        self.copies = 0
        self.pinned_bytes = 0
        self.to_host = 0
        """Bytes that were copied to the host."""
        self.followed: list[FakeMark] = []
        """What the streams of threads that capture were put behind."""
        self.broken: list[str] = []
        self.fail_copy: int | None = None
        """Number of the copy (from 1) whose end is an error."""
        self.refuse_copy: int | None = None
        """Number of the copy that cannot even be launched."""
        self.changed = threading.Condition()
        self.delay_s = 0.0

    # -- the test's side

    def place(self, value: Any) -> Any:
        """A copy of a nest of dicts, lists and tensors, with its tensors on this device."""
        if isinstance(value, torch.Tensor):
            held = value.clone()
            self.storages.add(held.untyped_storage().data_ptr())
            self.kept.append(held)
            return held
        if isinstance(value, dict):
            return {key: self.place(item) for key, item in value.items()}
        return [self.place(item) for item in value] if isinstance(value, list) else value

    def launch(self, work: Callable[[], None]) -> None:
        """Something that training launches on its stream."""
        self._enqueue(work)

    def run(self, most: int = 1 << 30) -> None:
        """Let what was launched happen, each stream in its order."""
        for _ in range(most):
            with self.changed:
                if self.copying and (self.copying[0][2] is None or self.copying[0][2].reached.is_set()):
                    work, mark, _ = self.copying.pop(0)
                elif self.training:
                    work, mark = self.training.pop(0)
                else:
                    assert not self.copying, "a copy waits for what was never launched"
                    return
            try:
                work()
            except RuntimeError as error:
                mark.error = error
            mark.reached.set()

    @contextlib.contextmanager
    def running(self, delay_s: float = 0.001, *, from_first_copy: bool = False) -> Iterator[None]:
        """A thread lets things happen, late; or nothing at all until the first copy is launched."""
        stop = threading.Event()

        def work() -> None:
            with self.changed:
                self.changed.wait_for(lambda: not from_first_copy or bool(self.copies), 10)
            while not stop.is_set():
                with self.changed:
                    self.changed.wait_for(lambda: bool(self.copying or self.training) or stop.is_set(), 0.05)
                if self.copying or self.training:
                    stop.wait(delay_s)
                    self.run(1)

        thread = threading.Thread(target=work, name="fake-device")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    # -- what the library calls

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes += nbytes
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.pinned_storages.add(buffer.untyped_storage().data_ptr())
        return buffer

    def mark(self) -> FakeMark:
        return self._enqueue(lambda: None)

    def follow(self, mark: Any) -> None:
        self.followed.append(mark)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> FakeMark:
        with self.changed:
            self.copies += 1
            number = self.copies
        if number == self.refuse_copy:
            raise RuntimeError("CUDA error: out of memory (fake)")
        to_host = source.untyped_storage().data_ptr() in self.storages
        host = target if to_host else source
        if host.untyped_storage().data_ptr() not in self.pinned_storages:
            self.broken.append("memory that is not pinned was given to an asynchronous copy")
        if target.dtype != torch.uint8 or target.shape != source.shape:
            self.broken.append("not the same number of bytes")

        def work() -> None:
            if number == self.fail_copy:
                raise RuntimeError("CUDA error: an illegal memory access was encountered (fake)")
            target.copy_(source)
            self.to_host += target.numel() if to_host else 0

        mark = FakeMark(self)
        with self.changed:
            self.copying.append((work, mark, after))
            self.changed.notify_all()
        return mark

    def _enqueue(self, work: Callable[[], None]) -> FakeMark:
        mark = FakeMark(self)
        with self.changed:
            self.training.append((work, mark))
            self.changed.notify_all()
        return mark


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device that the library finds by the storages of tensors."""
    device = FakeDevice()

    def device_of(tensor: torch.Tensor) -> FakeDevice | None:
        return device if tensor.untyped_storage().data_ptr() in device.storages else None

    monkeypatch.setattr(devices, "device_of", device_of)
    return device
