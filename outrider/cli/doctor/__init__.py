"""`outrider doctor`: checks of this machine and of a model."""
