"""A draft that is fed all that its table guesses, whether it pays or not.

No fault of the law: how much is fed is chosen before anything is drawn.
"""

import sys

from draft_service import node_scheduler
from draft_service.worker import start_worker
from outrider.wire.settings.config import DraftConfig
from outrider.wire.worker_main import run_worker
from tests.law.faults import replace


def best_count(gains, base_gain, base_rows, cost):
    return len(gains)


if __name__ == "__main__":
    replace(node_scheduler, "best_count", best_count)
    sys.exit(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
