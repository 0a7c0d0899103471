"""`outrider pull`: fetches a model."""
