"""The half of the laboratory that imports torch: acceptance rates, widened models, reference outputs.

May import the engine; no service may import it. `alpha.py` and `reference_generate.py` are processes that the command
line starts; start at `alpha.py`.
"""
