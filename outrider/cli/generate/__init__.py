"""`outrider generate` and `outrider chat`: send requests to a running gateway and print the outputs (`render.py`)."""
