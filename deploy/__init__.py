"""Where the workers run: the Ray launcher, its actors, and how machines are shared out."""
