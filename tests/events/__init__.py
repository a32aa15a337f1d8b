"""Tests of the job's structured log."""
