"""The part of `lab` that imports torch: measurement of acceptance, widened models, reference outputs.

May import the engine; no service may import it. `alpha.py` and `reference_generate.py` are processes that the command
line starts; start at `alpha.py`.
"""
