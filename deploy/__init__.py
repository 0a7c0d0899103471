"""Runs workers: the Ray launcher, its actors and the placement on machines; beside them what Compose, Helm and
Prometheus need.

Imports `wire` and, in the actors' processes, the services; nothing imports it. Start at `launcher.py`, then `fleet.py`.
"""
