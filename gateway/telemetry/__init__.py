"""Metrics, logs and traces of the gateway: Prometheus series, one log line for each request, and spans.

From the gateway it imports only `gateway.generation`. Start at `request_record.py`.
"""
