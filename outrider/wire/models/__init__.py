"""Readers of a model's name, files and tokenizer that need no torch, and the check whether two models form a pair.

Used by gateway, workers, launcher and command line. May import `outrider.wire` and `outrider.v1`. Start at `model_id`,
which reads the setting `model`.
"""
