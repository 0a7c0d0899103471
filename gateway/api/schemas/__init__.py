"""The bodies of requests to /v1/completions, /v1/chat/completions and vLLM's endpoints, as pydantic models.

`parsing.py` creates a body from JSON, and the body's `unchecked_request()` converts it to an `UncheckedRequest`.
`layers.py` is the base of the bodies in `gateway.api.layers`. `answers` describes responses, only for /openapi.json.
Start at `base.py`, then `openai.py`. May import what `gateway.api` may, but neither routes nor writers.
"""
