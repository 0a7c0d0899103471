"""The drafters that this worker can run: a model, a head, a table. Imports `slots`.

Start at `choice.py`, which makes the one that the settings name.
"""
