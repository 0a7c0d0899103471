"""Quantised weights: which methods are read, how they are unpacked, and layers of 8 bits of our own.

Start at `quantize.py`, which the loader calls. `packed_linear` is for speed alone: its weights are laid out by oneDNN
beforehand. Imports `outrider.engine.files`, `memory` and `outrider.wire`.
"""
