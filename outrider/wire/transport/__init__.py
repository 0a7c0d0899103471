"""Connections between processes: gRPC servers and channels, TLS, streams, limits of calls, and tensors in messages.

May import `outrider.wire` and `outrider.v1`, and no torch. Start at `serving` (a worker's server), `tls.Dialer` (a
channel) and `streams` (the Control stream between gateway and workers).
"""
