"""Bodies of Anthropic's Messages API."""

from typing import Any

import pytest

from gateway.admission.prompts import Chat
from gateway.api.layers.messages_schemas import CountBody, MessagesBody
from gateway.api.schemas.parsing import parse_body
from gateway.api.schemas.vllm import TokenizeBody
from gateway.tools.reading import ReasoningBudget
from outrider.wire.errors import InvalidRequest, NoThreads
from tests.unit.gateway.api.schemas.prompts_of import USER, called, chat_of, prompt_of, result, system

HEADER = "x-anthropic-billing-header: cc_version=2.1.0; cch=11111;"


async def test_an_agents_header_stays_out_of_system_blocks() -> None:
    blocks = [{"type": "text", "text": HEADER}, {"type": "text", "text": "LONG", "cache_control": {}}]
    body = {"system": blocks, "messages": [{"role": "user", "content": HEADER}]}
    assert await prompt_of("messages", body) == f"[system]LONG[user]{HEADER}"
    assert await prompt_of("messages", body, agent_header="keep") == f"[system]{HEADER}\nLONG[user]{HEADER}"
    assert await prompt_of("messages", {**body, "system": HEADER}) == f"[user]{HEADER}"
    kept = {**body, "system": [{"type": "text", "text": f"See {HEADER}\n{HEADER}"}, blocks[0]]}
    assert await prompt_of("messages", kept) == f"[system]See {HEADER}\n{HEADER}[user]{HEADER}"
    assert await chat_of(system(f"{HEADER}\nLONG"), USER) == "[system]LONG[user]a"
    assert await prompt_of("responses", {"input": "a", "instructions": f"{HEADER}\nLONG"}) == "[system]LONG[user]a"


def test_a_thread_is_refused_so_that_anthropics_client_goes_on_without() -> None:
    for kind in ("create", "continue"):
        for cls, needed in ((MessagesBody, {"max_tokens": 1}), (CountBody, {})):
            with pytest.raises(NoThreads) as caught:
                parse_body(cls, {"messages": [USER], "thread": {"type": kind}, **needed})
    assert caught.value.details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_fields_of_messages_without_effect_are_ignored_and_older_names_are_read() -> None:
    fields = {"fallbacks": [{"model": "x"}], "billing_policy": {}, "fallback_credit_token": "x", "thread": None}
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    demand = parse_body(
        MessagesBody, {"messages": [USER], "max_tokens": 1, "output_format": schema, **fields}
    ).unchecked_request("a")
    assert demand.output is not None and demand.output.param == "output_format.schema"
    parse_body(CountBody, {"messages": [USER], "max_tokens": 5, "stop_sequences": ["x"], "metadata": {"user_id": "u"}})
    tokenized = {"messages": [USER, called('{"x'), result()], "documents": [{"text": "x"}]}
    (chat,) = parse_body(TokenizeBody, tokenized).unchecked_request("id").prompts
    assert isinstance(chat, Chat) and chat.documents == ({"text": "x"},)


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 5}, ReasoningBudget(5, is_optional=True)),
        ({"type": "enabled"}, None),
        ({"type": "adaptive", "budget_tokens": 0}, None),
        ({"type": "disabled", "budget_tokens": 5}, None),
    ],
)
def test_thinking_that_is_enabled_has_a_budget(thinking: dict[str, Any], budget: ReasoningBudget | None) -> None:
    body = {"messages": [USER], "max_tokens": 1, "thinking": thinking}
    (chat,) = parse_body(MessagesBody, body).unchecked_request("id").prompts
    assert isinstance(chat, Chat) and chat.reasoning_budget == budget


def test_a_budget_out_of_range_is_refused() -> None:
    for given in (0, 1 << 31):
        body = {"messages": [USER], "max_tokens": 1, "thinking": {"type": "enabled", "budget_tokens": given}}
        shown = f"thinking.budget_tokens is {given}, must be from 1 to 2147483647"
        with pytest.raises(InvalidRequest, match=shown) as caught:
            parse_body(MessagesBody, body).unchecked_request("id")
        assert caught.value.param == "thinking.budget_tokens"
