"""What the groups of devices share: NCCL, XCCL, and whatever can launch, be asked and be aborted."""
