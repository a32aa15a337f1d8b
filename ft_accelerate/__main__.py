"""`python -m ft_accelerate`: the command `ft-accelerate`."""

import sys

from ft_accelerate.commands import main

if __name__ == "__main__":
    sys.exit(main())
