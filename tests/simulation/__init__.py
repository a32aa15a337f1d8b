"""A seeded, deterministic cluster simulation of the pure control plane (see `world`)."""
