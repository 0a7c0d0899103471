"""A target whose engine hangs for good while its server answers: the first of those of one model folder that is fed
HANG_ID while a file ARMED lies there. The others are sound.
"""

import sys
import time
from pathlib import Path

from outrider.engine.model_runner import ModelRunner
from outrider.wire.settings.config import TargetConfig, load
from tests.law.faults import replace, run_target

HANG_ID = 300
ARMED = "armed"

forward = ModelRunner.forward


def hanging(self, rows):
    if any(HANG_ID in row.new_ids for row in rows):
        folder = Path(load(TargetConfig, sys.argv[1:]).model)
        try:
            (folder / ARMED).rename(folder / "hangs")
        except FileNotFoundError:
            pass
        else:
            time.sleep(3600)
    return forward(self, rows)


if __name__ == "__main__":
    replace(ModelRunner, "forward", hanging)
    run_target()
