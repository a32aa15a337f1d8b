"""The program of test_lost_state.py: `lost_job.py [yes]`. Two groups; both are killed once they hold some steps.

In its first life a group says `holds STEP PID` after 5 steps and waits for its end; in a later one `ended STEP`.
"""

from __future__ import annotations

import os
import sys
import threading

import torch

from ft_accelerate import FaultTolerancePlugin, FaultTolerantAccelerator

STEPS = 5

if __name__ == "__main__":
    torch.set_num_threads(1)
    plugin = FaultTolerancePlugin(min_replicas=2, from_scratch=True if sys.argv[1:] == ["yes"] else None)
    accelerator = FaultTolerantAccelerator(cpu=True, fault_tolerance_plugin=plugin)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    while accelerator.committed_steps < STEPS:
        accelerator.backward(model(torch.ones(4, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print("holds", accelerator.committed_steps, os.getpid(), flush=True)
        threading.Event().wait()
    print("ended", accelerator.committed_steps, flush=True)
    accelerator.end_training()
