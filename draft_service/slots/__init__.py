"""State of one choice in the draft worker. Imports nothing else of this service but its jobs.

Start at `draft_slot.py`.
"""
