"""The choice of the draft tokens that a step verifies. It may import `leases` and `features`; `step` imports it.

Start at `choice.py`: a slot's drafters give `Candidates` (`slot_candidates.py`), `budget.py` chooses how many of them
are verified, over all slots, and the result is a `Proposal` (`proposal.py`). `own_drafts.py` keeps the target's own
drafters.
"""
