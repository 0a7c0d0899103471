"""The bodies of answers as pydantic models, from which /openapi.json describes them.

The gateway does not make its answers of these models: `gateway.api.openai_responses` and `gateway.api.forms` make plain
dicts, which is faster. Tests hold the two together. Imports pydantic alone. Start at `openai.py`.
"""
