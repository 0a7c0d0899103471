"""A target that looks at proposals token by token, as it does under lenience. No fault: this, too, has the
target's law.
"""

import sys

from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.step import decide, decide_on_device
from target_service.worker import start_worker
from tests.law.faults import replace


def decide_by_token() -> None:
    for rules in (decide, decide_on_device):
        replace(rules, "is_block", lambda proposal: False)


if __name__ == "__main__":
    decide_by_token()
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
