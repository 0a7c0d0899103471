"""Overlapped rounds beside the same two models in one process, over links of a given round trip, and the simulation of
both: `make bench-overlap`, or `python -m benchmarks.overlap --help`.
"""
