"""`outrider pull`: fetches a model from a hub. `pull.py` is the command, `hub.py` chooses and fetches the files."""
