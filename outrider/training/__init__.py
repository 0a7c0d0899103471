"""Trains draft heads and drafts on what a target writes, for `outrider train-head` and the demo pair's recipe."""
