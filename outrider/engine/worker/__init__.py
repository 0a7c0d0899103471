"""The parts that both workers share: the engine thread, its jobs, slots and scheduler, and the gRPC service.

May import `outrider.engine.sampling`, `step_plan` and what these import, but not the runner. Start at
`worker_handle.py` (`start`), which puts the parts together; a step begins in `scheduler.py`.
"""
