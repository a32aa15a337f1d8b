"""The names under which Lightning knows the strategies, and what was noted when `import torch` ran.

Invariant: only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import os

NAME = "fault_tolerant"
FSDP2 = "fault_tolerant_fsdp2"
DESCRIPTION = "Data parallel over replica groups, any of which may fail and come back (ft_lightning)"
FSDP2_DESCRIPTION = "As fault_tolerant, with the model sharded inside each replica group (FSDP2, tensor parallelism)"


def _working_directory() -> str:
    with contextlib.suppress(OSError):
        return os.getcwd()
    return ""


STARTED_IN = _working_directory()
"""Where the process was when torch was imported: a script may go elsewhere, its command line was written for here."""
