"""Tests of what is counted out of the events, and served to Prometheus."""
