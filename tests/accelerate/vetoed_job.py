"""The program of test_vetoed.py: two groups make 6 steps; in the attempt after step 2 group 1 reports an error."""

from __future__ import annotations

import os

import torch

from ft_accelerate import FaultTolerancePlugin, FaultTolerantAccelerator

if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator = FaultTolerantAccelerator(cpu=True, fault_tolerance_plugin=FaultTolerancePlugin(min_replicas=2))
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    reported = skipped = 0
    while accelerator.committed_steps < 6:
        loss = model(torch.ones(4, 2)).sum()
        if accelerator.committed_steps == 2 and not reported and os.environ["FT_REPLICA_GROUP"] == "1":
            assert accelerator.manager is not None
            accelerator.manager.report_error(RuntimeError("the sensor gave NaN"))
            reported = 1
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        skipped += accelerator.optimizer_step_was_skipped
    print("skipped", skipped, flush=True)
    accelerator.end_training()
