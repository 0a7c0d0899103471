"""Who may ask, how much at once, and who waits: keys, limits, bytes, the queue, and the checks of a request."""
