"""State of one choice in the draft worker: its cache slot and its draft tree. Imports of this service only `jobs`.

Start at `draft_slot.py`.
"""
