"""What all processes share and what needs no torch: errors and the values that travel between them.

`transport` has gRPC, TLS and streams. `settings` has the settings of every process, `requests` the parameters of a
request, `models` the readers of a model's files, `processes` child processes and health, and `telemetry` logs, metrics
and traces. Only `outrider.v1`, the generated messages, is imported from elsewhere. Start at `errors`.
"""
