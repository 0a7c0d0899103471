"""What becomes of a request: its grammar, its prediction, its caller, and what an operator bounds."""

from typing import Any

import pytest

from gateway.admission.request_checks import check_request
from gateway.api.schemas.openai import ChatBody, CompletionBody
from gateway.api.schemas.parsing import parse_body
from gateway.grammar_checker import GrammarChecker
from gateway.grammars import create_regex_grammar
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.scheduling import Scheduling
from tests.checkers import InlinePool
from tests.unit.gateway.admission.asked import FACTS, TOKENIZER, built, predicting, reader_of
from tests.unit.gateway.tools.plans import tokenizer_of


async def test_a_grammar_is_checked_once_for_all_answers() -> None:
    pool = InlinePool()
    body = {"prompt": ["a", "b"], "n": 2, "structured_outputs": {"regex": "x+"}}
    demand = parse_body(CompletionBody, body).unchecked_request("i")
    requests = await built(demand, checker=GrammarChecker(pool))
    assert [request.params.grammar for request in requests] == [create_regex_grammar("x+", "p")] * 4
    assert pool.num_run == 1


@pytest.mark.parametrize(
    ("asked", "shown"),
    [({"num_draft_tokens": 17}, "num_draft_tokens is 17"), ({"tree": "4x2x1"}, "tree is 4x2x1, 20 nodes")],
)
async def test_an_operator_bounds_what_a_request_may_have_drafted(asked: dict[str, object], shown: str) -> None:
    demand = parse_body(CompletionBody, {"prompt": "x", "speculation": asked}).unchecked_request("id")
    await built(demand)
    with pytest.raises(InvalidRequest, match=f"{shown}, and at most 16 tokens are drafted; .* max_draft_tokens"):
        await built(demand, max_draft_tokens=16)


@pytest.mark.parametrize("content", ["the quick brown fox", [{"type": "text", "text": "the quick brown fox"}]])
async def test_a_prediction_is_tokens_of_every_answer(content: Any) -> None:
    requests = await built(predicting(content, n=2, prompt=["x", "y"]))
    assert [each.prediction_ids for each in requests] == [tuple(TOKENIZER.encode("the quick brown fox"))] * 4


@pytest.mark.parametrize(
    ("wish", "is_used"),
    [
        ({}, True),
        ({"drafter": "prediction"}, True),
        ({"drafter": "prediction|model"}, True),
        ({"drafter": "ngram"}, False),
        ({"enabled": False}, False),
        ({"num_draft_tokens": 0}, False),
    ],
)
async def test_a_prediction_is_used_where_something_is_drafted_and_no_other_drafter_named(
    wish: dict[str, Any], is_used: bool
) -> None:
    (request,) = await built(predicting("the fox", speculation=wish))
    assert bool(request.prediction_ids) is is_used


async def test_what_no_output_can_be_is_no_prediction() -> None:
    with pytest.raises(InvalidRequest, match=r"prediction.content holds '<\|endoftext\|>'.* leave it out") as caught:
        await built(predicting("int x;<|endoftext|>"))
    assert caught.value.param == "prediction.content"


async def test_a_request_has_a_caller_and_a_priority() -> None:
    """An API key goes before a salt, by which callers are told apart where there are no keys."""

    async def scheduling(key_name: str | None, **body: Any) -> Scheduling:
        demand = parse_body(CompletionBody, {"prompt": "x", **body}).unchecked_request("id")
        check_request(demand, [FACTS])
        (request,) = await built(demand, key_name, 2.0)
        return request.scheduling

    nobody, salted = await scheduling(None), await scheduling(None, cache_salt="a")
    assert (nobody.caller, nobody.weight, nobody.priority, nobody.max_tpot_ms) == (b"", 2.0, 0, None)
    assert len({nobody.caller, salted.caller, (await scheduling("a")).caller, (await scheduling("b")).caller}) == 4
    assert (await scheduling("a", cache_salt="b")).caller == (await scheduling("a", cache_salt="a")).caller
    asked = await scheduling("a", priority=-3, max_tpot_ms=40)
    assert (asked.priority, asked.max_tpot_ms) == (-3, 40.0)
    for wrong in ({"priority": 2**31}, {"max_tpot_ms": 0}, {"max_tpot_ms": -1.5}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            await scheduling("a", **wrong)


async def test_a_budget_of_reasoning_is_named_where_it_keeps_ignore_eos_out() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 5, "ignore_eos": True}
    demand = parse_body(ChatBody, body).unchecked_request("id")
    chats = reader_of()
    chats.tokenizer = tokenizer_of("{{ messages }}{# </think> #}", True)
    with pytest.raises(InvalidRequest, match="ignore_eos is true and thinking_token_budget sets the form"):
        await built(demand, reader=chats)
