"""The process group over NCCL."""
