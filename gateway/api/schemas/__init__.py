"""The bodies of requests to /v1/completions, /v1/chat/completions and vLLM's endpoints, as pydantic models.

A body turns itself into an `UncheckedRequest` with `demand()`; `parsing.py` reads one from JSON. `layers.py` is the
base of the bodies in `gateway.api.forms`. `answers` describes what is answered, for /openapi.json alone. Start at
`base.py`, then `openai.py`. May import what `gateway.api` may, but neither routes nor forms.
"""
