"""What the gateway records of its work: Prometheus series, one log line for each request, and spans.

Of the gateway it imports `gateway.generation` alone. Start at `request_record.py`.
"""
