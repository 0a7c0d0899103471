"""Grows the draft trees of all slots and pushes what is new to the target. Imports `slots`.

Start at `grower.py`.
"""
