"""The half of a worker that needs torch: KV cache, model runner, sampling, acceptance.

Used by the two worker services; in processes of their own also by `doctor` (`checkup`), the lab and training. Imports
`outrider.wire` and `outrider.drafting`, no service, and `outrider.papers` from `drafters` alone. Start at
`step_plan.py`, which defines the rows of a forward, and `model_runner.py`, which runs one.
"""
