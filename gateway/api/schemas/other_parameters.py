"""Parameters of other servers that are not fields of our bodies: those that are ignored, and those that are refused.

Each body has its own tables of them. `other_parameters` adds these to /openapi.json, and `without_others` applies them
to a request. The tables of docs/openai.md are made from them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.wire.errors import InvalidRequest

IGNORED = {
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "prompt_cache_key": "prefixes are found by their tokens; a pair has one cache",
    "prompt_cache_retention": "kept until the memory is needed",
    "verbosity": "models here are not told of it",
    "request_id": "the header `x-request-id` says it",
    "client_metadata": "nothing is stored",
}
"""Parameters that are accepted and have no effect, with the reason."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "chat_template": (),
    "function_call": ("none",),
    "functions": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,),
    "search_parameters": ({"mode": "off"},),
    "spaces_between_special_tokens": (True,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""For each parameter of OpenAI, xAI and vLLM that is not supported: the values (besides null) that are still accepted,
because the server does the same without the parameter."""

REPLACEMENTS = {
    "guided_json": '"structured_outputs": {"json": ...}',
    "guided_regex": '"structured_outputs": {"regex": ...}',
    "guided_choice": '"structured_outputs": {"choice": [...]}',
    "guided_grammar": '"structured_outputs": {"grammar": ...}',
    "guided_json_object": '"structured_outputs": {"json_object": true}',
    "guided_decoding_backend": None,
    "guided_whitespace_pattern": None,
    "grammar": '"structured_outputs": {"grammar": ...}',
    "json_schema": '"response_format": {"type": "json_schema", "json_schema": ...}',
    "enable_thinking": '"chat_template_kwargs": {"enable_thinking": ...}',
    "max_new_tokens": '"max_tokens"',
    "n_predict": '"max_tokens"',
    "repeat_penalty": '"repetition_penalty"',
    "do_sample": '"temperature", of which 0 is greedy',
    "num_beams": '"use_beam_search": true and "n"',
    "stop_words": '"stop"',
}
"""For each parameter name of other servers or of older versions: what to write here instead; None if there is no
equivalent."""


def without_former(value: Any) -> Any:
    """Return a body without the parameters that REPLACEMENTS names, if their values are null.

    Raises InvalidRequest, which names the equivalent, if such a parameter has another value. A JSON value that is no
    object is returned unchanged; pydantic refuses it later.
    """
    if not isinstance(value, dict):
        return value
    for name in value.keys() & REPLACEMENTS.keys():
        if value[name] is not None:
            raise InvalidRequest(f"{name} is no parameter here; {_remedy(REPLACEMENTS[name])}", param=name)
    return {name: field for name, field in value.items() if name not in REPLACEMENTS}


def _remedy(replacement: str | None) -> str:
    if replacement is None:
        return "leave it out"
    return f"write {replacement} instead"


def other_parameters(neutral: dict[str, tuple[Any, ...]], ignored: dict[str, str]) -> Callable[[dict[str, Any]], None]:
    """Return the function for pydantic's `json_schema_extra` that adds these parameters to a body's JSON schema.

    neutral: for each parameter that is not supported, the values (besides null) that are accepted. ignored: for each
    parameter that has no effect, the reason.
    """

    def add(schema: dict[str, Any]) -> None:
        for name, why in ignored.items():
            schema["properties"][name] = {"description": f"Accepted, changing nothing: {why}."}
        for name, values in neutral.items():
            schema["properties"][name] = {"description": "Not offered; these ask for nothing.", "enum": [None, *values]}

    return add


def without_others(value: Any, neutral: dict[str, tuple[Any, ...]], ignored: dict[str, str]) -> Any:
    """Return a body without the parameters in `neutral` and `ignored`. A JSON value that is no object stays unchanged.

    neutral: for each parameter that is not supported, the values (besides null) that are accepted; for any other value
    InvalidRequest is raised. ignored: for each parameter that has no effect, the reason.
    """
    if not isinstance(value, dict):
        return value
    for name in value.keys() & neutral.keys():
        if value[name] is not None and value[name] not in neutral[name]:
            raise InvalidRequest(f"{name} is not offered by this server; leave it out", param=name)
    return {name: field for name, field in value.items() if name not in neutral and name not in ignored}
