"""Sends completion requests to a running gateway over HTTP, as users do, and computes their speed.

`outrider tune --price` and `benchmarks/` use it; it imports no part of either. Start at `load.py`, which sends
requests; `ladder.py` repeats them at several concurrencies with speculation and without.
"""
