"""`python -m benchmarks.overlap.apart_draft`: a draft whose steps take as long as STEP_S says, most of it asleep.

That is a draft on hardware of its own, whose steps slow down no step of the target. Where both really compute, they
read their weights from one memory at the same time, which a pair in one process never does.
"""

import json
import os
import sys
import time
from collections.abc import Sequence

from torch import Tensor

from benchmarks.overlap.costs import at_rows
from draft_service.worker import start_worker
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.processes.worker_main import leave, run_worker
from outrider.wire.settings.config import DraftConfig

STEP_S = "BENCH_STEP_S"
"""Of the environment: JSON of seconds by rows."""

if __name__ == "__main__":
    seconds = {int(rows): taken_s for rows, taken_s in json.loads(os.environ[STEP_S]).items()}
    forward = ModelRunner.forward

    def slept(runner: ModelRunner, rows: Sequence[Row]) -> Tensor:
        ends_s = time.monotonic() + at_rows(seconds, sum(row.num_new for row in rows))
        logits = forward(runner, rows)
        time.sleep(max(0.0, ends_s - time.monotonic()))
        return logits

    ModelRunner.forward = slept  # type: ignore[method-assign]
    leave(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
