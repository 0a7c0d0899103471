"""What one key asked and was answered changes nothing of what another is proposed, counted and shown, of the drafters
that keep anything between requests.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from tests.stack import Process, stop_all
from tests.tiny_models import tiny_llama

PROMPT = [7 * i % 300 + 5 for i in range(40)]
"""Of two whole blocks of the prefix cache, and some."""
NUM_TOKENS = 9
NUM_KEYS = 300
LONGEST_RUN = 3
"""Draft tokens in a row that may be another's by chance."""


@dataclass
class Server:
    """Two gateways with API keys over one target: beside a draft that is a model, which `lookup` drafts for, and beside
    one of `lookup`.
    """

    by_draft: dict[str, Process]
    _keys: Iterator[int] = field(default_factory=itertools.count)

    def new_key(self) -> str:
        """Return a key that nobody has used."""
        return f"or-{next(self._keys)}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Random weights: what is sampled from them at a temperature above 1 is a text that no model foretells."""
    folder = tmp_path_factory.mktemp("keys")
    target, draft = (tiny_llama(folder / str(seed), seed=seed, sharpness=3.0) for seed in (0, 1))
    keys = [ApiKey(name=f"key-{i}", sha256=digest_of(f"or-{i}")) for i in range(NUM_KEYS)]
    write_keys(folder / "keys.yaml", keys)
    wait = {"wait": False}
    patient = ("--batch-invariant", "@target_service.leases.hold.MAX_HOLD_S=3")
    workers = [
        Process("target_service", ["--model", target, *patient], **wait),
        Process("draft_service", ["--model", draft, "--drafted-by", "lookup"], **wait),
        Process("draft_service", ["--model", target, "--drafter", "lookup"], **wait),
    ]
    gateways = list[Process]()
    try:
        for each in workers[1:]:
            addresses = ["--target", workers[0].address, "--draft", each.address]
            ports = ["--port", "0", "--grpc-port", "0", "--max-draft-tokens", "32"]
            gateways.append(Process("gateway", [*addresses, *ports, "--api-keys", str(folder / "keys.yaml")], **wait))
        yield Server(dict(zip(("model", "lookup"), gateways, strict=True)))
    finally:
        stop_all([*gateways, *workers])


@dataclass(frozen=True)
class Seen:
    """All that a request was told, but for times and what follows from them."""

    ids: list[int]
    rounds: list[dict[str, Any]]
    usage: dict[str, Any]

    @property
    def runs(self) -> set[tuple[int, ...]]:
        """Draft tokens of a round in a row, one more than may be another's by chance."""
        found = set[tuple[int, ...]]()
        for each in self.rounds:
            ids = [token["id"] for token in each["draft"]]
            found |= _runs(ids)
        return found


def _runs(ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + LONGEST_RUN + 1]) for i in range(len(ids) - LONGEST_RUN)}


@dataclass(frozen=True)
class Asker:
    """Streams completions of one gateway, drafted for in one way."""

    http: httpx.AsyncClient
    drafter: str | None

    async def ask(self, key: str, prompt: list[int], **body: Any) -> Seen:
        how = {"drafter": self.drafter, "explain": True, "num_draft_tokens": 8, "acceptance": "coupled"}
        asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "seed": 4711, "ignore_eos": True, "stream": True}
        asked |= {"stream_options": {"include_usage": True}, "speculation": how, **body}
        headers = {"authorization": f"Bearer {key}"}
        reply = await self.http.post("/v1/completions", json=asked, headers=headers)
        assert reply.status_code == 200, reply.text
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        *events, last = [json.loads(line) for line in lines if line != "data: [DONE]" and line != "[DONE]"]
        told = [event["choices"][0]["speculation"] for event in events]
        rounds = [each["round"] for each in told if "round" in each]
        for each in rounds:
            for name in ("timings", "batch_size"):
                each.pop(name, None)
            if each["rejection"] is not None:  # what lies ready there and was not verified, which times decide
                each["rejection"]["draft_guesses"] = None
        return Seen([token["id"] for each in told for token in each["tokens"]], rounds, last["usage"])


@contextlib.asynccontextmanager
async def asker_of(server: Server, drafter: str) -> Any:
    """drafter: one that a request may name, or `lookup worker`: that of a draft worker."""
    draft, name = ("lookup", None) if drafter == "lookup worker" else ("model", drafter)
    address = server.by_draft[draft].ready["http"]
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http:
        yield Asker(http, name)


@pytest.mark.parametrize("drafter", ["lookup", "lookup+model", "lookup&model", "lookup worker"])
async def test_nobody_is_shown_what_another_key_was_answered(server: Server, drafter: str) -> None:
    """Nor what another user of the key was."""
    sampled = {"max_tokens": NUM_TOKENS, "temperature": 1.3}
    first = server.new_key()
    async with asker_of(server, drafter) as asker:
        plain = await asker.ask(
            server.new_key(), PROMPT, **sampled, speculation={"enabled": False, "token_kinds": True}
        )
        pairs = [list(pair) for pair in itertools.pairwise(plain.ids)]
        before = [await asker.ask(server.new_key(), pair) for pair in pairs]
        answer = await asker.ask(first, PROMPT, **sampled)
        assert answer.ids == plain.ids
        others = [await asker.ask(server.new_key(), pair) for pair in pairs]
        users = [await asker.ask(first, pair, user=f"user {i}") for i, pair in enumerate(pairs)]
        own = await asker.ask(first, pairs[0])
    for seen in (others, users):
        assert not any(each.runs & _runs(answer.ids) for each in seen)
        assert seen == before
    assert own.rounds[0]["draft"], "it copies from what the same key was answered"
    assert own.runs & _runs(answer.ids)


@pytest.mark.parametrize("drafter", ["lookup", "lookup+model", "lookup&model", "lookup worker", "model", "ngram&model"])
async def test_a_used_server_proposes_counts_and_shows_another_key_what_an_unused_one_does(
    server: Server, drafter: str
) -> None:
    """The prompt is the first key's own, and its answer behind it: prefix caches, corpora and estimates know it."""
    async with asker_of(server, drafter) as asker:
        prompt = [*PROMPT[::-1], 9, 9, 9]
        unused = await asker.ask(server.new_key(), prompt)
        first = server.new_key()
        answer = await asker.ask(first, prompt, temperature=1.3, max_tokens=24)
        await asker.ask(first, [*prompt, *answer.ids])
        known = await asker.ask(first, prompt)
        used = await asker.ask(server.new_key(), prompt)
    assert known.usage["prompt_tokens_details"]["cached_tokens"] == 32
    assert used.usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert used == unused
