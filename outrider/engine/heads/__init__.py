"""Draft heads: small networks that draft from a target's hidden states. Their files, networks and attention paths.

May import the rest of the engine but for drafters. Start at `families.py`, the table of heads, and at `loader.py`; a
new head is described in docs/add-a-head.md.
"""
