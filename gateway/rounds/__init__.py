"""The rounds of one choice: lease, verdict, commit, and the choice's state."""
