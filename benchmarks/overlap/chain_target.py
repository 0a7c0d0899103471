"""`python -m benchmarks.overlap.chain_target`: a target that verifies chains alone, whatever tree its draft grows."""

import sys

from outrider.engine.model_runner import ModelRunner
from outrider.wire.processes.worker_main import leave, run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.worker import start_worker

if __name__ == "__main__":
    ModelRunner.supports_trees = property(lambda runner: False)  # type: ignore[method-assign, assignment]
    leave(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
