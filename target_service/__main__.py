"""`python -m target_service --model FOLDER`: the target worker as a plain process. `--help` lists the settings."""

import sys

from outrider.wire.processes.worker_main import leave, run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.worker import start_worker

if __name__ == "__main__":
    leave(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
