"""Run workers: the Ray launcher, its actors and their placement on machines; and files for Compose, Helm and
Prometheus.

Imports `wire` and, in the actors' processes, the services; nothing imports it. Start at `launcher.py`, then `fleet.py`.
"""
