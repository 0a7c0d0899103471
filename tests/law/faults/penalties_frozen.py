"""A target whose penalties count the committed tokens alone and forget the draft tokens before a position."""

import sys

from outrider.engine.sampling.penalties import SamplingState
from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.worker import start_worker
from tests.law.faults import replace

edits = SamplingState.edits


def frozen(self, draft_prefix):
    return edits(self, ())


if __name__ == "__main__":
    replace(SamplingState, "edits", frozen)
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
