"""Runs a script unchanged, but with long optimizer steps while a file exists: until the group that was killed is back.

paced.py FILE SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import pathlib
import runpy
import sys
import threading

from torch.optim.optimizer import register_optimizer_step_post_hook

STEP_S = 0.3


def main() -> None:
    """Run it."""
    slow, calm = pathlib.Path(sys.argv[1]), threading.Event()
    del sys.argv[:2]

    def pace(*_: object) -> None:
        if slow.exists():
            calm.wait(STEP_S)

    register_optimizer_step_post_hook(pace)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
