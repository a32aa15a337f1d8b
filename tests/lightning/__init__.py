"""Tests of ft_lightning."""
