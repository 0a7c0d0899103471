"""Logs, metrics and traces of every process. May import `outrider.wire` and prometheus_client; OpenTelemetry only where
`trace_endpoint` is set. Start at `log` and `metrics`.
"""
