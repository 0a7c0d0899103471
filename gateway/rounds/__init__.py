"""The rounds of one choice (lease, verdict, commit), and the state of the choice.

It may import `gateway.workers` and what lies below it. Start at `decode_loop.py`, whose `run_round` is one whole round.
"""
