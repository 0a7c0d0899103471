"""Measures a pair of models and recommends settings for it: `outrider alpha` and `outrider tune`.

It imports the SDK, parts of the command line and `wire`. No worker and no gateway imports it. Only `lab.models` imports
torch, and runs in a separate process. Start at `tune.py`.
"""
