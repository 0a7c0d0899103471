"""Workers with one thing replaced, each run as a process, as `python -m draft_service` is."""
