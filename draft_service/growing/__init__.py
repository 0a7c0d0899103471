"""Grows the draft trees of all slots, and sends new nodes to the targets. Imports `slots` and the service's jobs.

Start at `grower.py`: its `step` is the draft worker's step.
"""
