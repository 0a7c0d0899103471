"""Hidden states of the target: who subscribes to them, and the heads that the target itself runs. Imports `leases`.

Start at `features.py`.
"""
