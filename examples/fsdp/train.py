"""A small language model, sharded with FSDP2 inside each replica group, replicated over the groups.

    ftrun --replicas 2 --nproc-per-replica 2 examples/fsdp/train.py

Kill any worker (`kill -9` of a pid that ftrun prints): its group is started again, heals shard by shard from the other,
and goes on at its batch. Start it again with more steps, another number of groups or ranks: it goes on from the newest
checkpoint. Lines marked (*) are all that a plain FSDP2 script does not have.
"""

import argparse
import math
from datetime import timedelta
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from ft_core.loop import TrainingLoop  # (*)

VOCABULARY, CONTEXT = 256, 64


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, RoFormer) of (batch, heads, time, head size)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()), -1)


class Block(nn.Module):
    """Attention and a gated feed-forward, each after a norm and beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        seen = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        y = self.second(x)
        out: Tensor = x + self.down(silu(self.gate(y)) * self.up(y))
        return out


class Model(nn.Module):
    """Decoder-only: bytes to logits of the next byte."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) to (batch, time, VOCABULARY)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Progress:  # (*)
    """Where this replica is in its data; part of the state."""

    batch = 0

    def state_dict(self) -> dict[str, int]:
        """For who comes back, and for checkpoints."""
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.batch = state["batch"]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints (default %(default)s)")
    parser.add_argument("--folder", default="checkpoints", help="of the checkpoints (default %(default)s)")
    args = parser.parse_args()

    dist.init_process_group(timeout=timedelta(minutes=2))  # of this replica group
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = here.type if here else "cpu"
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))

    model = Model(width=128, depth=4, heads=4)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list("\n".join(topics[key] for key in sorted(topics)).encode()))

    progress = Progress()  # (*)
    loop = TrainingLoop({"model": model, "optimizer": optimizer, "progress": progress})  # (*)
    loop.replicate(model)  # (*)
    loop.resume(args.folder)
    if rank == 0:
        print(f"group {loop.group} of {loop.groups} begins at batch {progress.batch}", flush=True)

    while (batch := loop.open(progress.batch)) is not None and batch < args.steps:  # (*)
        progress.batch = batch
        share = torch.Generator().manual_seed((batch * loop.groups + loop.group) * ranks + rank)
        starts = torch.randint(len(text) - CONTEXT, (8,), generator=share)
        window = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        loop.settle()  # (*)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not loop.vote():  # (*)
            continue  # a replica group was lost: nothing has changed, and all try this batch again
        optimizer.step()
        progress.batch += 1
        if progress.batch % args.every == 0:
            loop.save_distributed(f"{args.folder}/step_{progress.batch}", asynchronous=True)
            if loop.leads:
                print(f"step {progress.batch}: loss {loss.item():.3f} of {math.log(VOCABULARY):.3f}", flush=True)
    loop.end()  # (*)
    if rank == 0:
        print(f"group {loop.group}: done at step {progress.batch}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
