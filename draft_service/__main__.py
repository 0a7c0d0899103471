"""`python -m draft_service --model FOLDER`: the draft worker as a plain process. `--help` lists the settings."""

import sys

from draft_service.worker import start_worker
from outrider.wire.processes.worker_main import leave, run_worker
from outrider.wire.settings.config import DraftConfig

if __name__ == "__main__":
    leave(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
