"""A target whose every forward takes PAUSE_S longer, asleep: streams last long enough to kill and restart a draft."""

import sys
import time

from outrider.engine.model_runner import ModelRunner
from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.worker import start_worker
from tests.law.faults import replace

PAUSE_S = 0.03

forward = ModelRunner.forward


def paced(self, rows):
    time.sleep(PAUSE_S)
    return forward(self, rows)


if __name__ == "__main__":
    replace(ModelRunner, "forward", paced)
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
