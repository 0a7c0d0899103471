"""Measures a pair of models and recommends settings for it: `outrider alpha` and `outrider tune`.

Imports the SDK, the command line's parts and `wire`; no worker and no gateway imports it. Only `lab.models` imports
torch, in a process of its own. Start at `tune.py`.
"""
