"""The lighthouse, as users start it: `python -m ft_core.lighthouse`. The command line is `control.lighthouse.cli`."""

from __future__ import annotations

import sys

from ft_core.control.lighthouse.cli import main
from ft_core.control.lighthouse.server import LighthouseServer

__all__ = ["LighthouseServer", "main"]

if __name__ == "__main__":
    sys.exit(main())
