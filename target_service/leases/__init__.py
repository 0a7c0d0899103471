"""Leases of the target's slots, and the draft tokens that are delivered for them.

Nothing here imports another folder of `target_service`; `features`, `drafting` and `step` import it. Start at
`lease.py`, the state of one lease. `leases.py` holds all leases, `draft_buffer.py` the delivered tokens. `hold.py`
decides how long a step waits for more, `slot_search.py` is a beam search in a lease, and `lease_jobs.py` has the
messages as plain values.
"""
