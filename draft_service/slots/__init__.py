"""State of one choice in the draft worker: its cache slot and its draft tree. Of this service it imports `jobs` only.

Start at `draft_slot.py`.
"""
