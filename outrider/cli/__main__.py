"""The console script: runs `main`, ends without a traceback on a Ctrl-C during imports, and silences gRPC's C++ log."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line. A Ctrl-C during its imports ends it with exit code 130 and no traceback."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported
    try:
        from outrider.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
