"""`python -m tiered`."""

import sys

from tiered.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
