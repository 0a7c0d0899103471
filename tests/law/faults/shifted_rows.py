"""A draft whose rows are a position further than the target says. No fault of the law."""

import dataclasses
import sys

from draft_service.growing.grower import Grower
from draft_service.worker import start_worker
from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import DraftConfig
from tests.law.faults import replace

take = Grower._store_features


def take_otherwise(self, job):
    """What is missing at the beginning is not to be had."""
    take(self, dataclasses.replace(job, start=job.start + 1))


if __name__ == "__main__":
    replace(Grower, "_store_features", take_otherwise)
    sys.exit(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
