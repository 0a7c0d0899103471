"""`outrider top`: a screen of what a running system does."""
