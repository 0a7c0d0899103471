"""Parameters of a request, with their limits, as gateway, workers and SDK share them: plain values, to and from proto.

May import `outrider.wire.errors`, `outrider.wire.kinds` and `outrider.v1`. Start at `params` (how tokens are drawn) and
`speculation` (how they are drafted).
"""
