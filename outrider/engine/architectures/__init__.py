"""The differences between model architectures: text parts, layer memory, context limits and positions.

Start at `layer_memory.py`, which lists the layer types that are served. Imports only `outrider.engine.files`, the
engine's errors and `outrider.wire`.
"""
