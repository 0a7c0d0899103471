"""The workers of the gateway: links to them, membership, pools, health, placement, and the models that they serve.

It may import `gateway.admission`, `gateway.telemetry` and what lies below them, but not `gateway.rounds`. Start at
`worker_pools.py`, which keeps models and links in line with the membership, and `served.py`, which chooses the workers
of a request.
"""
