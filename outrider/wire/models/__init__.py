"""What can be read of a model without torch: its name, its files, its tokenizer, and whether two models form a pair.

Used by gateway, workers, launcher and command line. May import `outrider.wire` and `outrider.v1`. Start at `model_id`,
which reads the setting `model`.
"""
