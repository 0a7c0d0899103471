"""A target that replaces a rejected draft by a draw from its own law instead of the set_residual."""

import sys

from outrider.engine.sampling import acceptance
from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.worker import start_worker
from tests.law.faults import replace
from tests.law.faults.by_token import decide_by_token

if __name__ == "__main__":
    decide_by_token()
    replace(acceptance, "set_residual", lambda target_probs, draft_probs: target_probs)
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
