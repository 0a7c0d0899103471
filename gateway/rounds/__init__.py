"""The round of one request: propose, verify, commit, and the state of its answer."""
