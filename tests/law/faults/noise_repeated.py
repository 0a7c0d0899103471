"""A target whose own noise is the same at every position of a sequence."""

import sys

from outrider.engine.sampling import coupled
from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.worker import start_worker
from tests.law.faults import replace

uniforms = coupled.uniforms


def repeated(params, position, ids):
    return uniforms(params, 0, ids)


if __name__ == "__main__":
    replace(coupled, "uniforms", repeated)
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
