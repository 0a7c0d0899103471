"""The choice of the draft tokens that a step verifies. It may import `leases` and `features`; `step` imports it.

Start at `draft_chooser.py`: it collects what a slot's drafters propose as `Candidates` (`slot_candidates.py`).
`budget.py` chooses how many of them are verified, over all slots, and the result is a `Proposal` (`proposal.py`).
`own_drafts.py` keeps the target's own drafters.
"""
