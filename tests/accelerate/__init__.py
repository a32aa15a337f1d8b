"""Tests of ft_accelerate."""
