"""The drafters that a draft worker can run: a model, a head, a table. May import `slots`.

Start at `drafter_choice.py`, which makes the one that the settings name.
"""
