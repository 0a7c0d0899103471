"""Drafters without a model, by counts of n-grams and by copies of earlier text, and maps between vocabularies.

Targets, drafts and `outrider alpha` use them. May import `outrider.wire`, numpy and tokenizers, and no torch. Start at
`drafter`, which has the protocols.
"""
