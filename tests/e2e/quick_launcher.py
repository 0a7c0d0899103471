"""The launcher, which waits less: for machines, and before it ends a worker that hangs."""

import sys

from deploy import fleet, launcher
from outrider.wire.settings import system

if __name__ == "__main__":
    system.NODE_TIMEOUT_S = 1.0
    fleet.HUNG_AFTER_S = 10.0
    sys.exit(launcher.main(sys.argv[1:]))
