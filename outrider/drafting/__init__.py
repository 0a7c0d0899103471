"""Drafters without a model, which count n-grams or copy earlier text, and maps between vocabularies.

Used by targets, drafts and `outrider alpha`. May import `outrider.wire`, numpy and tokenizers, and no torch. Start at
`sequence_drafter`, which has the protocols.
"""
