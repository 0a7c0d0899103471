"""A target that verifies a proposal only when all of it has come."""

import sys

from target_service.drafts import Drafts

from outrider.wire.settings.config import TargetConfig
from outrider.wire.worker_main import run_worker
from target_service.lease import Candidates
from target_service.worker import start_worker
from tests.law.faults import replace

candidates = Drafts.candidates


def whole(self, lease):
    found = candidates(self, lease)
    wanted = min(lease.speculation.num_draft_tokens, lease.room)
    return found if len(found.nodes) >= wanted else Candidates(lease)


if __name__ == "__main__":
    replace(Drafts, "candidates", whole)
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
