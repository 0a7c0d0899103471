"""The launcher, which waits less for machines."""

import sys

from deploy import launcher
from outrider.wire.settings import system

if __name__ == "__main__":
    system.NODE_TIMEOUT_S = 1.0
    sys.exit(launcher.main(sys.argv[1:]))
