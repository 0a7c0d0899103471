"""CUDA graphs of decode and verify steps. Everything here also runs without a GPU, eagerly or with fake graphs in
tests.

Start at `graphed_path.py`, the path `flash`; `step_graphs.py` captures and replays. Imports `attention` and the modules
below it.
"""
