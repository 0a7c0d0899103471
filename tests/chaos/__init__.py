"""Streams through targets, drafts and gateways while one part after the other dies, hangs, lies or is cut off.

`make chaos ARGS='--minutes 10 --streams 16 64'`; not part of pytest. What it reads like: `run.py` (the whole of it),
`system.py` (the processes and the network between them), `plan.py` and `faults.py` (what happens when), `questions.py`
and `load.py` (who asks what, and whether the answer is right), `excuses.py` (which errors have a cause), `watching.py`
(who noticed what), `checks.py` (what is as before, what is left), `results.py` (the tables).
"""
