"""A target that proposes nothing of what a grammar leaves no choice of: `python -m benchmarks.unforced_target`."""

import sys

from outrider.wire.processes.worker_main import leave, run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.drafting.choice import Drafting
from target_service.worker import start_worker

if __name__ == "__main__":
    assert hasattr(Drafting, "or_forced"), "what is replaced here has another name now"
    Drafting.or_forced = lambda self, found: found  # type: ignore[method-assign]
    leave(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
