"""Leases: what a gateway lets a slot of the target run, and the draft tokens delivered for it.

Start at `lease.py`.
"""
