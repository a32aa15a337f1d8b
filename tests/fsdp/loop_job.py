"""A training loop of one's own over an FSDP2 model, in groups of RANKS; digests after every commit.

SAVE: a folder; a checkpoint of the job every SAVE_EVERY batches, and the newest is loaded at the start. ASYNC=1: while
it trains on, and twice. NO_ROOM: from 2 batches before this one to 4 after it files cannot be written. FULL=1: the
model's state is gathered, which is refused. ODD: a group that shards on a mesh of another name. LATE: "GROUP RANK PLACE
SECONDS", who comes later than its siblings; PLACE is `start` (of the process), `loop` or `open` (of the first step).
FREEZE: "GROUP RANK BATCH", who stops itself between forward and backward, where the others of its group wait for it;
with STOPS=vote before its vote, when they wait for that.
DIES: "GROUP RANK BATCH", who kills itself there; the ranks of the other groups are there, too, until they are in the
next quorum. HERE: a folder for them to say so.
END: a file that will hold the number of batches, in place of BATCHES.

Lines: `pid GROUP RANK PID`, `freezes GROUP RANK BATCH`, `commit BATCH GROUP RANK DIGEST` (of this rank's shards of
parameters and optimizer state), `veto BATCH`, `done GROUP RANK BATCH DIGEST`, `saving|loaded GROUP BATCH WHOLE` (digest
of all that all ranks hold).
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import resource
import signal
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ft_core.loop import TrainingLoop
from tests.fsdp.modes import MODES, RANKS, backward, built, digest, optimizer_of

if TYPE_CHECKING:
    from collections.abc import Callable

BATCHES = int(os.environ.get("BATCHES", "300"))
PACE_S = float(os.environ.get("PACE_S", "0.03"))
SAVE = os.environ.get("SAVE", "")
SAVE_EVERY = 8
END = pathlib.Path(os.environ["END"]) if "END" in os.environ else None
NO_ROOM = int(os.environ.get("NO_ROOM", "0"))
ASYNC = bool(os.environ.get("ASYNC"))
MODE = MODES[os.environ.get("FSDP_MODE", "clip")]


class Progress:
    """Of the training."""

    batch = 0

    def state_dict(self) -> dict[str, int]:
        """For who comes back."""
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.batch = state["batch"]


class Gathered:
    """A model whose state is gathered from all ranks."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        """Communicates."""
        return {key: value.full_tensor() for key, value in self.net.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Never called."""


def say(*words: object) -> None:
    """In one piece: the ranks of a group write to one pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def whole(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Digest of parameters and optimizer state, gathered from all ranks of the group."""
    found = hashlib.sha256()
    for parameter in net.parameters():
        for tensor in (parameter, *(v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor))):
            full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(full.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def batches() -> int:
    """After which training ends."""
    return int(END.read_text()) if END is not None and END.exists() else BATCHES


def linger(place: str) -> None:
    """Come late, if this rank is to."""
    late = os.environ.get("LATE", "").split()
    if late[:3] == [os.environ["FT_REPLICA_GROUP"], os.environ["RANK"], place]:
        say("late", *late)
        threading.Event().wait(float(late[3]))
        say("here", *late)


def freeze(rank: int, batch: int, place: str) -> None:
    """If this rank is to: its group has begun this batch with it, and cannot end it."""
    at = f"{os.environ['FT_REPLICA_GROUP']} {rank} {batch}"
    if os.environ.get("FREEZE") == at and os.environ.get("STOPS", "forward") == place:
        say("freezes", at)
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_for(what: Callable[[], bool]) -> None:
    """Until it holds; not for ever."""
    for _ in range(3000):
        if what():
            return
        threading.Event().wait(0.01)
    raise TimeoutError("what this rank waits for has not come")


def die(loop: TrainingLoop, rank: int, batch: int) -> None:
    """If this rank is to, and the ranks of the other group are where it is; if those are to be there, stay."""
    group, one, at = os.environ.get("DIES", "-1 0 -1").split()
    if batch != int(at) or loop.manager is None:
        return
    folder = pathlib.Path(os.environ["HERE"])
    if loop.group == int(group):
        if rank == int(one):
            wait_for(lambda: len(list(folder.iterdir())) == RANKS)
            os.kill(os.getpid(), signal.SIGKILL)
        return
    machine = loop.manager._runtime.rank
    before = machine.quorum_id
    (folder / str(rank)).touch()
    wait_for(lambda: machine.quorum_id != before and not machine.forming)


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    linger("start")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    name = "odd" if os.environ.get("ODD") == os.environ["FT_REPLICA_GROUP"] else "shard"
    net, roots = built(MODE, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,)))
    optimizer, progress = optimizer_of(MODE, net), Progress()
    linger("loop")
    model = Gathered(net) if os.environ.get("FULL") else net
    state: Any = {"model": model, "optimizer": optimizer, "progress": progress}
    loop = TrainingLoop(state, timeout=timedelta(seconds=20))
    loop.replicate(*roots)
    net.register_forward_hook(lambda *_: freeze(rank, progress.batch, "forward"))
    net.register_forward_hook(lambda *_: die(loop, rank, progress.batch))
    if SAVE and loop.resume(SAVE):
        say("loaded", loop.group, progress.batch, whole(net, optimizer))
    say("pid", loop.group, rank, os.getpid())
    linger("open")
    while (batch := loop.open(progress.batch)) is not None and batch < batches():
        progress.batch = batch
        if NO_ROOM:
            size = 1000 if NO_ROOM - 2 <= batch < NO_ROOM + 4 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        optimizer.zero_grad()
        backward(MODE, net, roots, batch, RANKS * loop.group + rank)
        freeze(rank, batch, "vote")
        threading.Event().wait(PACE_S)  # the others are in the run when who was killed is back
        if not loop.vote():
            say("veto", batch)
            continue
        optimizer.step()
        progress.batch += 1
        say("commit", progress.batch, loop.group, rank, digest(net, optimizer))
        if SAVE and progress.batch % SAVE_EVERY == 0:
            say("saving", loop.group, progress.batch, whole(net, optimizer))
            if ASYNC:
                loop.save_distributed(f"{SAVE}/once_{progress.batch}", asynchronous=True)
            loop.save_distributed(f"{SAVE}/batch_{progress.batch}", asynchronous=ASYNC)
    loop.end()
    say("done", loop.group, rank, progress.batch, digest(net, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
