"""A gateway whose targets wait for every proposal, for benchmarks of what drafts say and not of when they come."""

import sys

from gateway.__main__ import main
from gateway.planning import wait_budget

if __name__ == "__main__":
    wait_budget.LEAST_WAIT_S = wait_budget.MOST_WAIT_S = 2.0
    sys.exit(main(sys.argv[1:]))
