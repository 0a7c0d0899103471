"""`outrider generate` and `outrider chat`: requests to a running gateway, and how answers are shown."""
