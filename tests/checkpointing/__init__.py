"""Tests of `ft_core.checkpointing`."""
