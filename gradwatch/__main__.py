"""`python -m gradwatch` is the `gradwatch` command."""

import sys

from gradwatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
