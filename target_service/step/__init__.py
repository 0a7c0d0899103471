"""One step of the target: candidates, budget, forward, decision, commit, verdict.

It may import every other folder of `target_service`; only `worker.py` and `servicer.py` import it. Start at `step.py`,
which runs these in order; `verifier.py` handles the jobs that come between steps.
"""
