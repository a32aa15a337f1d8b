"""The process group that is taken where the user names none: by front ends, and for what travels in CPU memory."""

from __future__ import annotations

from ft_core.process_group.gloo.group import ProcessGroupGloo


def default_process_group() -> ProcessGroupGloo:
    """A new, unconfigured group for tensors in CPU memory; tensors on other devices are copied through it."""
    return ProcessGroupGloo()
