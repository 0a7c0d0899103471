"""Bodies of requests and answers, as pydantic models. Start at `base.py`."""
