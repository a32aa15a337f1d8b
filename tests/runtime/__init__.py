"""Managers as threads over a lighthouse without a network, with faults injected at a chosen replica and step."""
