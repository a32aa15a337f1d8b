"""Elastic data: pure parts, loaders, a simulation with a ledger, and real Managers and processes."""
