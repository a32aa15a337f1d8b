"""Elastic data under an Accelerator: divided per step among the groups that are there."""
