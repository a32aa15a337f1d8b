"""The lighthouse's dashboard."""
