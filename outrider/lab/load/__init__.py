"""Load on a running gateway, at one concurrency after the other, and the figures of it. Start at `load.py`."""
