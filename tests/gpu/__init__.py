"""Whole ways over a real GPU, in two processes that share it; marked gpu, for scripts/gpu."""
