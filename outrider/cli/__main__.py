"""The console script: `main` with a Ctrl-C while it still imports, and without what gRPC's C++ says of itself."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line. A Ctrl-C that comes before it has one of its own ends it with 130 and no traceback."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported
    try:
        from outrider.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
