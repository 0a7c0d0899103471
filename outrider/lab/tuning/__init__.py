"""Measurements of `outrider tune`: a pair's speed at every K and with each drafter, and the tokens for the money.

Imports the SDK, `lab.load` and the parts of the command line that start a system. Start at `study.py`; `runs.py` and
`costs.py` are used by `benchmarks/papers`, too.
"""
