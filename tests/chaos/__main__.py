"""`python -m tests.chaos`. Forked processes look at this module: it imports the rest only where it is the program."""

import sys

if __name__ == "__main__":
    from tests.chaos.run import main

    sys.exit(main())
