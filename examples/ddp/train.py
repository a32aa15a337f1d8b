"""A character-level transformer on Python's own documentation, trained by replica groups that may die at any time.

    ftrun --replicas 3 examples/ddp/train.py

Kill any of them with `kill -9`: the others keep training, ftrun starts it again, and it takes their state over the
network and goes on in step. At the end every replica prints the same digest. Without ftrun: start a lighthouse
(`FT_TOKEN=secret ft-lighthouse --bind [::]:29510`), then one of these per replica group, on any machine:

    FT_TOKEN=secret FT_LIGHTHOUSE=host:29510 FT_REPLICA_GROUP=0 FT_NUM_REPLICA_GROUPS=3 python examples/ddp/train.py
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import pathlib
import sys
import time
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ft_core import DistributedDataParallel, DistributedSampler, Manager, Optimizer
from ft_core.errors import JobFinishedError

CONTEXT = 64


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of CONTEXT characters and the same shifted by one: (int64 [CONTEXT], int64 [CONTEXT])."""

    def __init__(self) -> None:
        text = "\n".join(topics[key] for key in sorted(topics)).encode("ascii", "replace")
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * CONTEXT
        window = self.data[start : start + CONTEXT + 1]
        return window[:-1], window[1:]


class Transformer(nn.Module):
    """A small decoder-only transformer over bytes; logits of shape [batch, CONTEXT, 128]."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits for the character after each position of `x`, int64 [batch, CONTEXT]."""
        logits: torch.Tensor = self.head(self.blocks(self.embed(x) + self.position, mask=self.mask, is_causal=True))
        return logits


def digest(model: nn.Module) -> str:
    """Hash over every parameter and buffer: equal only if the models are bit-identical."""
    h = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        h.update(name.encode())
        h.update(tensor.detach().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader worker processes")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--checkpoint-dir", type=pathlib.Path, help="write and resume durable checkpoints here")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--wait-for-others", type=float, default=15.0, metavar="S", help="at the end, see there")
    parser.add_argument(
        "--commit-log", default="", metavar="PATH", help="append a line per commit; {group} and {pid} are replaced"
    )
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """Train to `args.steps`, with whoever else does."""
    torch.set_num_threads(1)
    group = int(os.environ.get("FT_REPLICA_GROUP", 0))
    groups = int(os.environ.get("FT_NUM_REPLICA_GROUPS", 1))

    dataset = Text()
    sampler = DistributedSampler(dataset, replica_rank=group, num_replica_groups=groups, shuffle=True, seed=0)
    loader = torch.utils.data.DataLoader(
        dataset, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True
    )

    model = Transformer()
    inner = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    checkpoint = Checkpoint(args.checkpoint_dir, manager, model, inner)
    checkpoint.load()

    started = last = time.monotonic()
    while manager.current_step() < args.steps:
        # The data position follows from the step, so a newcomer reads on where the others are.
        epoch, skip = divmod(manager.current_step(), len(loader))
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            if index < skip:
                continue
            optimizer.zero_grad()  # opens the step: joins, heals, or just goes on
            if manager.current_step() >= args.steps:
                manager.should_commit()  # came back when the others were done: see wait_for_others
                break
            loss = F.cross_entropy(ddp(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()  # on all replicas, or on none
            if not optimizer.committed:
                continue
            step, now = manager.current_step(), time.monotonic()
            log_commit(args.commit_log.format(group=group, pid=os.getpid()), manager)
            if step % args.log_every == 0 or step == args.steps:
                ms = (now - last) * 1000 / args.log_every
                members = manager.num_participants()
                print(f"step {step:4d}  loss {loss.item():.3f}  participants {members}  {ms:.1f} ms/step", flush=True)
                last = now
            checkpoint.after_commit(step, args.save_every)
            if step >= args.steps or (index + 1 < len(loader) and step % len(loader) != (index + 1) % len(loader)):
                break  # done, or healed to another position in the data
    wait_for_others(manager, groups, args.wait_for_others)
    manager.leave("finished", finished=True)
    checkpoint.publish()
    print(f"done: {args.steps} steps in {time.monotonic() - started:.1f} s, digest {digest(model)}", flush=True)
    manager.shutdown()


def main() -> int:
    """Options, logging, and a clear word to whoever comes when all is done."""
    args = options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        train(args)
    except JobFinishedError as error:
        print(f"nothing left to do: {error}", flush=True)
    return 0


def log_commit(path: str, manager: Manager) -> None:
    """One line: when, which step, with how many, on which history. '': none."""
    if not path:
        return
    words = manager.current_step(), manager.num_participants(), f"{manager.state_dict()['lineage']:x}"
    with open(path, "a") as log:
        print(f"{time.time():.4f}", *words, file=log)


def wait_for_others(manager: Manager, groups: int, max_s: float) -> None:
    """A group that is being restarted right now shall end with the others: idle steps until it is back.

    Nobody steps the optimizer in them, and all see the same number of participants, so all end after the same one.
    """
    until = time.monotonic() + max_s
    while manager.num_participants() < groups and time.monotonic() < until:
        time.sleep(0.05)
        manager.start_quorum()
        manager.should_commit()


class Checkpoint:
    """Durable checkpoints, written by the first participant, visible only once no failure can undo their step.

    Without a folder there are none.
    """

    def __init__(
        self, folder: pathlib.Path | None, manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.wanted = folder is not None
        folder = folder or pathlib.Path()
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.manager, self.model, self.optimizer = folder / "last.pt", manager, model, optimizer
        self.written: tuple[int, pathlib.Path] | None = None

    def load(self) -> None:
        """Resume, if there is something to resume from."""
        if not self.wanted or not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.manager.load_state_dict(state["manager"])  # the step, and with it the position in the data
        print(f"resumed from {self.path} at step {self.manager.current_step()}", flush=True)

    def after_commit(self, step: int, every: int) -> None:
        """Write every `every` steps; rename an earlier one into place as soon as its step is stable."""
        self.publish()
        if not self.wanted or step % every or self.manager.participating_rank() != 0:
            return
        with self.manager.pause("saving a checkpoint", max_s=60):
            path = self.path.with_suffix(f".{self.manager.replica_id.replace(':', '-')}.tmp")
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state | {"manager": self.manager.state_dict()}, path)
            self.written = (step, path)

    def publish(self) -> None:
        """Rename the last written checkpoint into place if every member of the quorum holds its step."""
        if self.written and self.manager.stable_step() >= self.written[0]:
            os.replace(self.written[1], self.path)
            self.written = None


if __name__ == "__main__":
    sys.exit(main())
