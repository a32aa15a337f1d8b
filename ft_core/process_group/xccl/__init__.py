"""The process group over XCCL."""
