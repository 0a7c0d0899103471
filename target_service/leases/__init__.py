"""Leases of the target's slots, and the draft tokens that are delivered for them.

Nothing here imports another folder of `target_service`; `features`, `drafting` and `step` import it. Start at
`lease.py`, the state of one lease; `leases.py` holds all of them, `draft_buffer.py` the delivered tokens, `hold.py`
says when a step waits for more, `beams.py` is a beam search in a lease, and `jobs.py` has the messages as plain values.
"""
