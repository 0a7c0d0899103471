"""A target whose every forward takes PAUSE_S longer, asleep: streams last long enough to kill and restart a draft."""

import time

from outrider.engine.model_runner import ModelRunner
from tests.law.faults import replace, run_target

PAUSE_S = 0.03

forward = ModelRunner.forward


def paced(self, rows):
    time.sleep(PAUSE_S)
    return forward(self, rows)


if __name__ == "__main__":
    replace(ModelRunner, "forward", paced)
    run_target()
