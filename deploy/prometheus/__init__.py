"""Configuration and rules of Prometheus for Outrider, and their check: `python -m deploy.prometheus`."""
