"""The ways a forward can be run. `loader.py` picks the first that passes the self-test: fused, flash, paged, dense."""
