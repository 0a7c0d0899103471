"""One step of the target: candidates, budget, forward, decision, commit, verdict. Imports every other folder here.

Start at `step.py`, which reads in this order.
"""
