"""A target that keeps at most 12,000 bytes of what drafts deliver, so that a few deliveries are too many."""

import sys

from outrider.wire.processes.worker_main import run_worker
from outrider.wire.settings.config import TargetConfig
from target_service.leases import draft_buffer
from target_service.worker import start_worker

MAX_BYTES = 12_000


def buffer_bytes(num_slots: int, vocab_size: int, memory_bytes: int) -> int:
    return MAX_BYTES


if __name__ == "__main__":
    draft_buffer.buffer_bytes = buffer_bytes
    sys.exit(run_worker("target", TargetConfig, start_worker, sys.argv[1:]))
