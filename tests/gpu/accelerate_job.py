"""An Accelerate script under ftrun on one GPU. Lines: `step NUMBER PARTICIPANTS PID GROUP`, at the end `done DIGEST`.

It names no process group. ACCELERATOR=cpu tries it where there is no GPU.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import warnings

os.environ["NCCL_HOSTID"] = "host-" + os.environ["FT_REPLICA_GROUP"]  # tests/gpu/pair.py says why
warnings.filterwarnings("ignore")
import torch  # noqa: E402
from torch import nn  # noqa: E402

from ft_accelerate import FaultTolerantAccelerator  # noqa: E402

LAST = pathlib.Path(os.environ["LAST_STEP"])
"""The test writes there where to end."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    on_cpu = os.environ.get("ACCELERATOR") == "cpu"
    accelerator = FaultTolerantAccelerator(cpu=on_cpu, mixed_precision="no" if on_cpu else "fp16")
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    manager = accelerator.manager
    assert manager is not None
    while not LAST.exists() or accelerator.committed_steps < int(LAST.read_text()):
        accelerator.backward(model(torch.randn(16, 32, device=accelerator.device)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        group = manager._runtime.shell.communicators.gradients.getBackendName()
        print("step", accelerator.committed_steps, manager.num_participants(), os.getpid(), group, flush=True)
    accelerator.end_training()
    parts = [part.detach().cpu().contiguous().numpy().tobytes() for part in (*model.parameters(), *model.buffers())]
    print("done", hashlib.sha256(b"".join(parts)).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main()
