"""What a request asks for: sampling, speculation, scheduling and their bounds. Start at `params.py`."""
