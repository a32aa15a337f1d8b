"""Tests of state over process groups."""
