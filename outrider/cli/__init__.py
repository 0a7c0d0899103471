"""The command line `outrider`: a file or a folder for each command.

Start at `main.py`, which lists the commands. This package imports the SDK, `wire`, and the commands that live in `lab`.
It imports no torch and no service, which run as child processes.
"""

import os

# It starts parts beside open channels. gRPC's handlers in a forked child, of no use to one that becomes another
# program, abort it now and then (grpc/grpc #43055). gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
