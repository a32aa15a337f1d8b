"""Tests of ft-report."""
