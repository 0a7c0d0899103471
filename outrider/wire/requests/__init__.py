"""Parameters of a request with their limits, shared by gateway, workers and SDK: plain values, and their conversion to
and from protobuf messages.

May import `outrider.wire.errors`, `outrider.wire.kinds` and `outrider.v1`. Start at `params` (how tokens are drawn) and
`speculation` (how they are drafted).
"""
