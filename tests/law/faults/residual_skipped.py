"""A target that replaces a rejected draft by a draw from its own law instead of the residual."""

import sys

from outrider.engine import acceptance
from outrider.wire.config import TargetConfig
from outrider.wire.worker_main import run_worker
from target_service.worker import start_worker
from tests.law.faults import replace

if __name__ == "__main__":
    replace(acceptance, "residual", lambda target_probs, draft_probs: target_probs)
    sys.exit(run_worker("target", TargetConfig, start_worker, [*sys.argv[1:], "--verification", "token"]))
