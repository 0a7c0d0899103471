"""What `outrider tune` is made of: runs of a served pair, what was to be expected of them, and what to choose."""
