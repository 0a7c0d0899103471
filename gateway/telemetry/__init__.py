"""What is recorded of requests, rounds and workers: log lines, spans and series."""
