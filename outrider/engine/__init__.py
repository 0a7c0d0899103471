"""The part of a worker that needs torch: KV cache, model runner, sampling, acceptance.

Used by the two worker services; also by `doctor` (`checkup`), the lab and training, in processes of their own. Imports
`outrider.wire` and `outrider.drafting`, no service, and `outrider.papers` from `drafter_table` alone. Start at
`step_plan.py`, which defines the rows of a forward, and `model_runner.py`, which runs one.
"""
