"""`python -m caveat.cli` is the command `caveat`."""

import sys

from caveat.cli import main

if __name__ == "__main__":
    sys.exit(main())
