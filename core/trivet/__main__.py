"""``python -m trivet`` is the command line."""

import sys

from trivet.cli import main

if __name__ == "__main__":
    sys.exit(main())
