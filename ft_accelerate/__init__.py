"""Accelerate front end of ft_core."""
