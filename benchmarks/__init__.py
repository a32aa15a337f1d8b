"""Figures of this project: `python -m benchmarks` measures them, prints a table and writes results.json."""
