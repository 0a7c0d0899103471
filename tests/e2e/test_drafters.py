"""Drafts that the target makes itself, through gateways with and without a draft worker: the text is the target's, and
what was drafted is counted under the drafter's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from outrider.client import Client, Drafter, InvalidRequest, Speculation, Usage
from outrider.wire.models.model_id import short_name
from tests.e2e.streams import PROMPT
from tests.samples import total
from tests.stack import Process, Stack, gateway_beside

REPETITIVE = "\n".join(f'{{"name": "item-{i}", "size": {i}, "tags": ["a", "b"]}}' for i in range(12)) + "\n"
MAX_TOKENS = 48
OWN = (Drafter.NGRAM, Drafter.LOOKUP, Drafter.LOOKAHEAD)
BOTH = (Drafter.NGRAM_MODEL, Drafter.LOOKUP_MODEL, Drafter.LOOKAHEAD_MODEL)
UNIONS = (Drafter.NGRAM_AND_MODEL, Drafter.LOOKUP_AND_MODEL)


@pytest.fixture(scope="module")
def alone(stack: Stack) -> Iterator[Process]:
    """A gateway of its own at the same target, without a draft, whose default is to look n-grams up first."""
    with gateway_beside(stack, "--drafter", "ngram+model", draft=False) as gateway:
        yield gateway


def said(address: str, prompt: str, wish: Speculation | bool) -> tuple[list[int], Usage]:
    with Client(address) as client:
        answer = client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, speculation=wish)
    return [token.id for token in answer.choices[0].tokens], answer.usage


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, list[int]]:
    """Of the target alone."""
    return {prompt: said(stack.grpc, prompt, False)[0] for prompt in (PROMPT, REPETITIVE)}


@pytest.mark.parametrize("drafter", [*OWN, *BOTH, *UNIONS])
def test_every_drafter_leaves_the_text_the_targets(
    stack: Stack, expected: dict[str, list[int]], drafter: Drafter
) -> None:
    own = {"target": short_name(stack.target_info().model_id), "draft": drafter.own or drafter}
    model = {**own, "draft": short_name(stack.draft_info().model_id)}
    before, drafted, accepted, rounds = stack.metrics(), 0, 0, 0
    for prompt, ids in expected.items():
        found, usage = said(stack.grpc, prompt, Speculation(drafter=drafter, num_draft_tokens=4))
        assert found == ids
        assert usage.num_rounds > 0 and 0 < usage.num_accepted_tokens <= usage.num_draft_tokens
        drafted += usage.num_draft_tokens
        accepted += usage.num_accepted_tokens
        rounds += usage.num_rounds
    after = stack.metrics()

    def counted(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    pairs = (own, model) if drafter in (*BOTH, *UNIONS) else (own,)
    assert counted("spec_draft_tokens_total", **own) > 0
    assert sum(counted("spec_draft_tokens_total", **pair) for pair in pairs) == drafted
    assert sum(counted("spec_accepted_tokens_total", **pair) for pair in pairs) == accepted
    assert sum(counted("spec_rounds_total", **pair) for pair in pairs) == rounds
    if drafter in (*BOTH, *UNIONS):
        assert counted("spec_draft_tokens_total", **model) > 0, "the draft worker had its share"


def test_two_in_one_tree_take_fewer_passes_than_either(stack: Stack) -> None:
    def passes(drafter: Drafter) -> float:
        _, usage = said(stack.grpc, REPETITIVE, Speculation(drafter=drafter, num_draft_tokens=4))
        assert usage.tokens_per_target_pass is not None
        return 1.0 / usage.tokens_per_target_pass

    own, model, both = map(passes, (Drafter.NGRAM, Drafter.MODEL, Drafter.NGRAM_AND_MODEL))
    assert both <= min(own, model)


def test_who_drafts_changes_back_and_forth(stack: Stack) -> None:
    """Who drafted is told by the series that a round counts in, as it comes."""
    wish = Speculation(drafter=Drafter.NGRAM_MODEL, num_draft_tokens=4)
    pairs, seen, before = ("ngram", short_name(stack.draft_info().model_id)), list[str](), stack.metrics()
    with Client(stack.grpc) as client:
        for _ in client.stream(PROMPT, max_tokens=96, temperature=0.0, ignore_eos=True, speculation=wish):
            after = stack.metrics()
            seen += [who for who in pairs if rounds_of(after, who) > rounds_of(before, who)]
            before = after
    assert set(seen) == set(pairs), seen


def rounds_of(samples: dict[str, float], draft: str) -> float:
    return total(samples, "spec_rounds_total", draft=draft)


def test_what_may_be_asked_for_is_told_and_the_rest_is_refused(stack: Stack, alone: Process) -> None:
    offered = [*OWN, *BOTH, "prediction", "prediction+model", *UNIONS]
    own = ["auto", *OWN, "prediction"]
    pair = ["auto", "model", *offered]
    for http, default, expected in ((stack.http, "auto", pair), (f"http://{alone.ready['http']}", "ngram", own)):
        (facts,) = httpx.get(f"{http}/v1/models").json()["data"]
        assert facts["drafters"] == expected
        assert (facts["drafter"], facts["chat_template"]) == (default, "plain")  # the demo pair continues text
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
        for drafter in {"bigram", "model", "ngram+model"} - set(expected):
            reply = httpx.post(f"{http}/v1/completions", json=body | {"speculation": {"drafter": drafter}})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "speculation.drafter")
            assert f"offered: {', '.join(expected)}" in error["message"]
            assert ("--target-drafter-text" in error["message"]) is (drafter == "bigram")
        reply = httpx.post(f"{http}/v1/completions", json=body | {"speculation": {"drafter": "lookup"}})
        assert reply.status_code == 200
    with Client(stack.grpc) as client:
        assert list(client.models()[0].drafters) == pair
        with pytest.raises(InvalidRequest, match="drafter is unigram, which neither target nor draft of"):
            client.generate("x", max_tokens=2, speculation=Speculation(drafter=Drafter.UNIGRAM))
