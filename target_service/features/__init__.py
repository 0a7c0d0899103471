"""Hidden states of the target as features for heads. It may import `leases`; `drafting` and `step` import it.

Start at `features.py`, which makes features after each step and sends them. `registered_heads.py` keeps the projections
that draft workers upload, `feature_stream.py` is the stream to one draft worker, and `own_heads.py` drafts with heads
in the target itself.
"""
