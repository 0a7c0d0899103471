"""The laboratory: measures a pair and chooses its settings. No worker and no gateway imports it.

Only `lab.models` imports torch. Start at `tune.py`.
"""
