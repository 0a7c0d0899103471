"""Processes of one machine: a worker's `main`, child processes, signals, health of peers, and folders on disk.

May import `outrider.wire` and `outrider.v1`. Start at `worker_main`, which every worker runs, and at `processes`, by
which the launcher starts workers.
"""
