"""The choice of the draft tokens that a step verifies. Imports `leases` and `features`.

Start at `choice.py`; `budget.py` chooses how many, `proposal.py` is the result.
"""
