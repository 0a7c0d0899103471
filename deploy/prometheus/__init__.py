"""Prometheus' configuration and rules for Outrider, and their check: `python -m deploy.prometheus`."""
