"""Where the workers run: the Ray launcher, and the reference that the demo compares with."""
