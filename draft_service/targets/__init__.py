"""The targets that this worker drafts for: the pairing check, vocabularies, registration of heads, and deliveries.

It may import `slots`, `jobs` and `drafters.loading`. Start at `deliveries.py`, which has one `TargetLink` per target.
"""
