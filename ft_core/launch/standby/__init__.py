"""Warm standbys: processes that have imported what a script needs."""
