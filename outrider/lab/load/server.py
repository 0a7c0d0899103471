"""How the server that is measured is reached, and which of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from outrider.cli import options as opt
from outrider.client.connect import metadata_of
from outrider.wire.errors import ConfigError, Unavailable

TAKES_SALT = ("outrider", "vllm")
"""`owned_by` of servers that read `cache_salt`; others may refuse what OpenAI's interface does not have."""


def headers_of(connection: opt.CallOptions) -> dict[str, str]:
    return dict(metadata_of(connection.options))


async def model_at(client: httpx.AsyncClient, wanted: str | None) -> Mapping[str, Any]:
    """Return what the server says of the model, the only one unless its id is given.

    Raises Unavailable and ConfigError, with the server's address and what to do.
    """
    url = str(client.base_url).rstrip("/")
    try:
        reply = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise Unavailable(
            f"no answer from {url} ({type(error).__name__}: {error}); start one with `outrider up`, or say --gateway "
            "with the URL of its HTTP server"
        ) from None
    if reply.status_code in (401, 403):
        raise ConfigError(f"{url} wants an API key that it knows (status {reply.status_code}); set OUTRIDER_API_KEY")
    try:
        models = {str(model["id"]): model for model in reply.json()["data"]}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{url} answers /v1/models with status {reply.status_code} and no list of models; is it an OpenAI server's "
            "HTTP address?"
        ) from None
    found = [model for name, model in models.items() if wanted in (None, name)]
    if len(found) != 1:
        what = "serves several models, or none; say --model" if wanted is None else f"does not serve {wanted}"
        raise ConfigError(f"{url} {what}; it has {', '.join(models) or 'none'}")
    one: Mapping[str, Any] = found[0]
    return one
