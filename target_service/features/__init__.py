"""Hidden states of the target as features for heads. It may import `leases`; `drafting` and `step` import it.

Start at `features.py`, which makes features after each step and sends them. `heads.py` registers the heads of draft
workers, `feature_stream.py` is one draft's stream, and `own_heads.py` drafts with heads in the target itself.
"""
