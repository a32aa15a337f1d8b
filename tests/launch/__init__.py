"""Tests of ftrun: what it decides (pure), and the processes it starts."""
