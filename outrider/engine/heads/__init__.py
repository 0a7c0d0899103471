"""Draft heads: small networks that draft from a target's hidden states. Their files, networks and attention paths.

May import the rest of the engine except its drafters. Start at `kinds.py`, the table of heads, and at
`head_loader.py`. docs/add-a-head.md has the steps to add a head.
"""
