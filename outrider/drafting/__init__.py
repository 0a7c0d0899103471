"""Drafters without a model: by counts of n-grams, and by copying earlier text. No torch."""
