"""FSDP2 inside replica groups: real processes, two groups of two ranks, against torch's own HSDP over all four."""
