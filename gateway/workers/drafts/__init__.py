"""Which drafts fit a target, and how much of them a request uses: pairing checks, tokenizer comparison, limits, use.

May import `outrider.wire`, `gateway.tokenizer` and the links of `gateway.workers`. Start at `pairing_checks.py`.
"""
