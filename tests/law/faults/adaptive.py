"""A target that verifies now so many drafts, now so many, none among them, whether it pays or not.
No fault of the law: how many are verified is chosen before they are looked at.
"""

import itertools
import sys

from outrider.wire.settings.config import TargetConfig
from outrider.wire.worker_main import run_worker
from target_service.rows import RowRule
from target_service.worker import start_worker
from tests.law.faults import replace

turns = itertools.count()


def choose(self, found, num_rows, most):
    return [min(len(each.gains), (next(turns) + len(each.lease.slot.committed)) % 4) for each in found]


def hold_until(self, lacking, now):
    """Wait for a guess at two of three lengths, whatever it costs."""
    until = [lease.ready_s + 0.2 for lease, *_ in lacking if len(lease.slot.committed) % 3]
    return max((each for each in until if now < each), default=None)


if __name__ == "__main__":
    replace(RowRule, "choose", choose)
    replace(RowRule, "hold_until", hold_until)
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
