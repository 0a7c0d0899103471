"""The round of one request: lease, verdict, commit, and the state of its answer."""
