"""What Prometheus reads of Outrider, and the check of its rules: `python -m deploy.prometheus`."""
