"""Records requests, rounds and workers: log lines, spans and series."""
