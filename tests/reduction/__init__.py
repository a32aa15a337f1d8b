"""Tests of ft_core.ddp and of what it is made of."""
