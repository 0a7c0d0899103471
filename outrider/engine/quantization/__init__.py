"""Quantised weights: which methods are read, how they are unpacked, and layers of 8 bits of our own.

Start at `quantize.py`, which the loader calls. `packed_linear` is about speed alone: weights that oneDNN lays out
beforehand. Imports `outrider.engine.files`, `memory` and `outrider.wire`.
"""
