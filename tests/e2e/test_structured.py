"""Structured output of the demo pair over HTTP: each complete answer is what was asked for, by every rule, and its text
is the one without a draft.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest

from tests.schemas import make_schema
from tests.stack import Stack, running

MAX_TOKENS = 120
CONCURRENCY = 8
NUM_SCHEMAS = [16, pytest.param(300, marks=pytest.mark.slow)]
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "n": 1},
    "rejection": {"temperature": 0.9, "n": 2, "seed": 5, "speculation": {"acceptance": "rejection"}},
    "coupled": {"temperature": 0.9, "n": 2, "seed": 5, "speculation": {"acceptance": "coupled"}},
    "tree": {"temperature": 0.9, "n": 1, "seed": 5, "speculation": {"acceptance": "coupled", "tree": "4x2x1"}},
}

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Texts with and without drafts are the same to the bit."""
    with running(target_args=("--batch-invariant",), log_folder=tmp_path_factory.mktemp("structured")) as started:
        yield started


@dataclass(frozen=True)
class Answers:
    texts: list[str]
    """Of each schema in order, and of each choice."""
    num_complete: int
    num_accepted: int


async def answers(stack: Stack, num_schemas: int, asked: dict[str, Any], is_drafted: bool) -> Answers:
    """Ask for an answer to each schema, and check those that ended by themselves."""
    wanted = {"num_draft_tokens": 4} | asked.get("speculation", {})
    if "tree" in wanted or not is_drafted:
        del wanted["num_draft_tokens"]
    if not is_drafted:
        wanted = {"enabled": False, "acceptance": wanted.get("acceptance", "rejection")}
    asked = asked | {"speculation": wanted}
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(http: httpx.AsyncClient, seed: int) -> dict[str, Any]:
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": make_schema(seed)}}
        body = {"prompt": f"data = {seed}, ", "max_tokens": MAX_TOKENS, "response_format": wanted, **asked}
        async with places:
            reply = await http.post("/v1/completions", json=body)
        assert reply.status_code == 200, (seed, reply.text)
        return dict(reply.json())

    async with httpx.AsyncClient(base_url=stack.http, timeout=300) as http:
        bodies = await asyncio.gather(*(one(http, seed) for seed in range(num_schemas)))
    num_complete = 0
    for seed, body in enumerate(bodies):
        for choice in body["choices"]:
            if choice["finish_reason"] == "stop":
                num_complete += 1
                jsonschema.Draft202012Validator(make_schema(seed)).validate(json.loads(choice["text"]))
            else:
                assert body["usage"]["completion_tokens"] >= MAX_TOKENS
    texts = [choice["text"] for body in bodies for choice in body["choices"]]
    accepted = sum(body["usage"]["speculation"]["num_accepted_tokens"] for body in bodies)
    return Answers(texts, num_complete, accepted)


@pytest.mark.parametrize("num_schemas", NUM_SCHEMAS)
@pytest.mark.parametrize(
    "rule", ["tree", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ASKED if rule != "tree")]
)
async def test_complete_answers_follow_their_schema_whatever_is_drafted(
    exact: Stack, rule: str, num_schemas: int
) -> None:
    drafted = await answers(exact, num_schemas, ASKED[rule], is_drafted=True)
    assert drafted.num_complete > len(drafted.texts) / 2, "most end within their tokens"
    assert drafted.num_accepted > num_schemas
    if rule == "rejection":  # another text of the same law
        return
    plain = await answers(exact, num_schemas, ASKED[rule], is_drafted=False)
    assert (plain.texts, plain.num_accepted) == (drafted.texts, 0)
