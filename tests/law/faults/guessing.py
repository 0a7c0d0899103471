"""A draft that is fed all that its table guesses, whether it pays or not.

No fault of the law: how much is fed is chosen before anything is drawn.
"""

import sys

from draft_service.growing.node_scheduler import NodeScheduler
from draft_service.worker import start_worker
from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import DraftConfig
from tests.law.faults import replace


def best(self, offers):
    return list(offers)


if __name__ == "__main__":
    replace(NodeScheduler, "_best", best)
    sys.exit(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
