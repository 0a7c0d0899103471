"""The draft worker: proposes draft tokens and sends them, with the distributions they were drawn from, to the targets.

It may import `outrider`, and neither `gateway` nor `target_service`. Start at `worker.py`, which assembles it, and then
at `growing/grower.py`, which runs its steps.
"""
