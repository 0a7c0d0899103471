"""Admission of requests: API keys, their limits, the limit on bytes held, the queue, and the checks of a request.

It may import `gateway.telemetry`, `gateway.tools` and the tokenizer, but neither `gateway.workers` nor
`gateway.rounds`. Start at `admission.py`, which calls the checks in their order.
"""
