"""The command line. `main` is its entry; each command has its own file."""

import os

# It starts parts beside open channels. gRPC's handlers in a forked child, of no use to one that becomes another
# program, abort it now and then (grpc/grpc #43055). gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
