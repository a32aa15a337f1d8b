"""One replica of the benchmarks: trains a model of 10 k parameters until it is told to stop, noting what happens when.

Notes go to the file BENCH_NOTES ({group} and {pid} are replaced), one `write` per line, so that a kill loses none:
`monotonic-seconds kind text`. Kinds:
commit (step, participants), veto, digest, log, and what `trace` adds: the stages of a recovery.
It takes commands on standard input: `go` (with --gated, before the Manager is made), `finish STEP`.
"""

# ruff: noqa: E402 (which ft_core is imported is the caller's choice)

from __future__ import annotations

import argparse
import hashlib
import itertools
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

sys.path[:0] = [path for path in [os.environ.get("FT_BENCH_CORE", "")] if path]

import torch
from torch import Tensor, nn

from ft_core import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo, default_process_group
from ft_core.protocol.pushes import Answer, Lost
from ft_core.protocol.rank.actions import TellGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ft_core.protocol.pushes import Push

WIDTHS = (64, 96, 32, 10)
BATCH = 32


def build(widths: tuple[int, ...] = WIDTHS) -> nn.Module:
    """A multi-layer perceptron."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Batches(torch.utils.data.IterableDataset[Tensor]):
    """Endless random batches."""

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.randn(BATCH, WIDTHS[0])


class Notes(logging.Handler):
    """The file of events; also takes ft_core's log records."""

    def __init__(self) -> None:
        super().__init__()
        path = os.environ["BENCH_NOTES"].format(group=os.environ.get("FT_REPLICA_GROUP", "-"), pid=os.getpid())
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, kind: str, text: object = "") -> None:
        os.write(self._fd, f"{time.monotonic():.6f} {kind} {text}\n".encode())

    def emit(self, record: logging.LogRecord) -> None:
        self.note("log", record.getMessage().replace("\n", " "))


class Orders(threading.Thread):
    """Standard input, read without locks that a forked worker could inherit."""

    def __init__(self) -> None:
        super().__init__(name="orders", daemon=True)
        self.go = threading.Event()
        self.last_step = 1 << 60

    def run(self) -> None:
        data = b""
        while chunk := os.read(0, 4096):
            data += chunk
            while b"\n" in data:
                line, _, data = data.partition(b"\n")
                word, *rest = line.decode().split()
                if word == "go":
                    self.go.set()
                elif word == "finish":
                    self.last_step = int(rest[0])


def trace(manager: Manager, note: Callable[[str, object], None]) -> None:
    """Note the stages of a recovery: pushed or broken, asked, answered, configuring, configured."""
    shell: Any = manager._runtime.shell  # looks inside on purpose

    def wrap(owner: Any, name: str, before: str = "", after: str = "") -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                note(before, "")
            try:
                return inner(*args, **kwargs)
            finally:
                if after:
                    note(after, "")

        setattr(owner, name, call)

    perform = shell.perform

    def performs(actions: Any) -> None:
        for action in actions:
            if isinstance(action, TellGroup):
                note("broken", action.reason)
        perform(actions)

    shell.perform = performs
    on_push = shell.on_push

    def pushes(push: Push) -> None:
        if isinstance(push, Lost):
            note("pushed", push.lost)
        elif isinstance(push, Answer):
            note("answered", push.seq)
        on_push(push)

    shell.on_push = pushes
    wrap(shell.control, "ask", before="asked")
    wrap(shell.communicators, "configure", before="configuring", after="configured")
    wrap(shell.communicators, "abort", after="aborted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=0, help="forked DataLoader workers")
    parser.add_argument("--inert-mb", type=int, default=0, help="size of a tensor that only has to be healed")
    parser.add_argument("--resident-mb", type=int, default=0, help="memory that is only held")
    parser.add_argument("--step-ms", type=float, default=0.0, help="what a step takes at least")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, on which the model is")
    parser.add_argument("--gated", action="store_true", help="wait for `go` before making the Manager")
    args = parser.parse_args()
    torch.set_num_threads(1)
    notes, orders = Notes(), Orders()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("ft_core").addHandler(notes)
    orders.start()

    torch.manual_seed(0)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device(args.device)
    model = build().to(device)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    inert = torch.arange(args.inert_mb * 250_000, dtype=torch.float32).mul_(0.5)
    resident = torch.ones(args.resident_mb * 250_000)
    if args.gated:
        notes.note("gated")
        inert.zero_()  # a newcomer: nothing of the state is there yet
        orders.go.wait()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        # An older ft_core (FT_BENCH_CORE) chooses no group by itself.
        pg=ProcessGroupGloo() if device.type == "cpu" else default_process_group(device),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        timeout=timedelta(seconds=30),
    )

    def load_inert(state: dict[str, Tensor]) -> None:
        if state["inert"].data_ptr() != inert.data_ptr():
            inert.copy_(state["inert"])

    if args.inert_mb:
        manager.register_state_dict_fn("inert", load_inert, lambda: {"inert": inert})
    trace(manager, notes.note)
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    loader = torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=args.workers)
    notes.note("ready")
    assert len(resident) == args.resident_mb * 250_000  # held until here
    pace = threading.Event()
    for batch in loader:
        optimizer.zero_grad()
        if args.step_ms:
            pace.wait(args.step_ms / 1e3)
        ddp(batch.to(device)).square().mean().backward()
        optimizer.step()
        if not optimizer.committed:
            notes.note("veto", manager.errored())
            continue
        step = manager.current_step()
        notes.note("commit", f"{step} {manager.num_participants()}")
        if step >= orders.last_step:
            break
    manager.leave("finished", finished=True)
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), inert]:
        digest.update(tensor.cpu().numpy().tobytes())
    notes.note("digest", digest.hexdigest()[:16])
    manager.shutdown()


if __name__ == "__main__":
    main()
