"""A target that keeps at most 12,000 bytes of what drafts deliver, so that a few deliveries are too many."""

from target_service.leases import draft_buffer
from tests.law.faults import replace, run_target

MAX_BYTES = 12_000


if __name__ == "__main__":
    replace(draft_buffer, "buffer_bytes", lambda num_slots, vocab_size, memory_bytes: MAX_BYTES)
    run_target()
