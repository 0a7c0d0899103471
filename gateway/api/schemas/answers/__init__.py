"""Bodies of responses as pydantic models, from which /openapi.json describes them.

The gateway does not create its responses with these models: `gateway.api.openai_responses` and `gateway.api.layers`
create plain dicts, which is faster. Tests check that both agree. Imports only pydantic. Start at `openai.py`.
"""
