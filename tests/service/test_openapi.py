"""/openapi.json says what the gateway does: generated requests get the statuses and bodies it names, and no fault."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.routing import Route

from gateway.api.app import create_app
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from tests.service.front_door import admission_of, http_of
from tests.service.scripted_generator import ScriptedGenerator, demo_tokenizer

TOKENIZER = demo_tokenizer()
GENERATOR = ScriptedGenerator(TOKENIZER, "the quick brown fox")
ADMISSION = admission_of(GENERATOR)
APP = create_app(ADMISSION)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


def generated(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )


def check(case: Any) -> None:
    """That a body is valid by the schema does not say that it can be served: fields depend on each other, and on the
    model.
    """
    del GENERATOR.requests[:]
    case.call_and_validate(excluded_checks=[positive_data_acceptance])
    assert GENERATOR.num_open == 0


@SCHEMA.parametrize()
@generated(12)
def test_generated_requests_get_what_the_schema_says(case: Any) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@SCHEMA.parametrize()
@generated(600)
def test_thousands_of_generated_requests_get_what_the_schema_says(case: Any) -> None:
    check(case)


def test_every_route_is_in_the_schema_and_no_other() -> None:
    found: set[tuple[str, str]] = set()
    pending: list[Any] = list(APP.routes)
    while pending:
        route = pending.pop()
        if isinstance(route, Route) and not route.include_in_schema:
            continue
        if isinstance(route, Route):
            path = route.path.replace(":path", "")
            found |= {(path, method) for method in route.methods or () if method != "HEAD"}
        else:
            pending += getattr(route, "routes", None) or route.original_router.routes
    paths = APP.openapi()["paths"]
    assert {(path, method.upper()) for path, item in paths.items() for method in item} == found


def test_keys_are_in_the_schema_where_they_are_asked_for(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.yaml", (ApiKey(name="me", sha256=digest_of("me")),))
    guarded_app = create_app(admission_of(GENERATOR, api_keys=str(tmp_path / "keys.yaml")))
    closed = guarded_app.openapi()
    assert "securitySchemes" not in APP.openapi()["components"]
    guarded = [path for path, item in closed["paths"].items() for operation in item.values() if "security" in operation]
    tokens = ["/detokenize", "/tokenize", "/tokenizer_info"]
    assert sorted(guarded) == tokens + sorted(path for path in closed["paths"] if path.startswith("/v1/"))


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_answers_and_chunks_are_as_the_schema_says(logprobs: int | None) -> None:
    schemas = APP.openapi()["components"]

    def valid(name: str, instance: Any) -> None:
        jsonschema.validate(instance, {"$ref": f"#/components/schemas/{name}", "components": schemas})

    chat_logprobs = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    async with http_of(ADMISSION) as http:
        for path, body, whole, chunk in (
            ("/v1/completions", {"prompt": "x", "logprobs": logprobs}, "Completion", "Completion"),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x"}], **chat_logprobs},
                "ChatCompletion",
                "ChatChunk",
            ),
        ):
            valid("CompletionBody" if whole == "Completion" else "ChatBody", body)
            valid(whole, (await http.post(path, json=body)).json())
            events = (await http.post(path, json={**body, **usage})).text.split("\n\n")
            assert len(events) > 4
            for event in events[:-2]:
                valid(chunk, json.loads(event.removeprefix("data: ")))
