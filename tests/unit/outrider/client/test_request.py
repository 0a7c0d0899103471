"""Arguments to messages: what reaches the gateway, and what is refused before the call."""

import math
from typing import Any

import pytest

from outrider.client import AsyncClient, DraftLogprobs, Speculation, StructuredOutputs
from outrider.v1 import common_pb2
from outrider.v1 import gateway_pb2 as pb
from outrider.wire import errors
from tests.unit.outrider.client.scripted_gateway import ScriptedGateway

SAMPLING: dict[str, Any] = {"max_tokens": 9, "min_tokens": 2, "temperature": 0.5}
SAMPLING |= {"top_k": 40, "top_p": 0.9, "min_p": 0.1}
SAMPLING |= {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": -0.25, "seed": 2**64 - 1}
SAMPLING |= {"logit_bias": {5: -100.0}, "stop_token_ids": [3], "ignore_eos": True, "num_logprobs": 0}
ASIDE: dict[str, Any] = {"cache_salt": "salz", "user": "somebody", "prediction": "größe", "priority": -7}
ASIDE |= {"max_tpot_ms": 12.5}
"""What the protocol names as the SDK does."""


async def test_every_parameter_reaches_the_gateway(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        await client.generate(
            "grüße",
            model="pair",
            **SAMPLING,
            bad_words=["damn", [8, 9]],
            n=2,
            stop="END",
            speculation=Speculation(num_draft_tokens=0, draft_logprobs=DraftLogprobs.TOPK, draft_topk=64),
            **ASIDE,
        )
    assert gateway.requests[0] == pb.GenerateRequest(
        model="pair",
        prompt="grüße",
        params=common_pb2.SamplingParams(**SAMPLING, bad_words=[common_pb2.TokenSequence(ids=[8, 9])]),
        has_seed=True,
        num_choices=2,
        stop=["END"],
        speculation=pb.SpeculationOptions(
            enabled=True,
            num_draft_tokens=common_pb2.NumDraftTokens(number=0),
            draft_logprobs=common_pb2.DRAFT_LOGPROBS_TOPK,
            draft_topk=64,
        ),
        bad_words=["damn"],
        **ASIDE,
    )


async def test_enums_may_be_given_by_name(gateway: ScriptedGateway) -> None:
    named = Speculation(acceptance="coupled", drafter="ngram+model", draft_logprobs="full")
    async with AsyncClient(gateway.address) as client:
        await client.generate("hello", speculation=named)
    (request,) = gateway.requests
    assert request.speculation.acceptance == common_pb2.ACCEPTANCE_RULE_COUPLED
    assert request.speculation.drafter == "ngram+model"
    assert request.speculation.draft_logprobs == common_pb2.DRAFT_LOGPROBS_FULL


async def test_what_is_not_given_is_absent(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        await client.generate("hello")
        await client.generate(prompt_ids=[4, 5], speculation=False, stop=["a", "b"])
        await client.generate(messages=[{"role": "user", "content": "hi"}])
    text, ids, chat = gateway.requests
    assert not text.has_seed and not text.HasField("structured_outputs")
    assert not text.params.HasField("num_logprobs")
    assert not text.speculation.HasField("num_draft_tokens")
    assert text.params.temperature == 1.0
    assert text.params.max_tokens == 16
    assert (list(ids.prompt_ids.ids), ids.speculation.enabled, list(ids.stop)) == ([4, 5], False, ["a", "b"])
    assert chat.WhichOneof("input") == "chat"
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "hi")]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"n": 129}, "n"),
        ({"bad_words": [["x"]]}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"stop": ["a", 5]}, "stop"),
        ({"cache_salt": "ö" * 129}, "cache_salt"),
        ({"cache_salt": b"\xff"}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"max_tpot_ms": 0}, "max_tpot_ms"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"speculation": Speculation(num_draft_tokens=-1)}, "speculation.num_draft_tokens"),
        ({"speculation": Speculation(acceptance="typical")}, "speculation.acceptance"),
        ({"speculation": Speculation(lenience=True)}, "speculation.lenience"),
        ({"speculation": Speculation(tree=4)}, "speculation.tree"),  # type: ignore[arg-type]
        ({"speculation": {"num_draft_tokens": 4}}, "speculation"),
        ({"prompt_ids": [1]}, "prompt"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputs()}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputs(regex="a", json_object=True)}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputs(json={"const": math.nan})}, "structured_outputs.json"),
        ({"structured_outputs": StructuredOutputs(json={"const": b""})}, "structured_outputs.json"),
        ({"structured_outputs": StructuredOutputs(regex=5)}, "structured_outputs.regex"),  # type: ignore[arg-type]
        ({"structured_outputs": StructuredOutputs(choice=["a", 1])}, "structured_outputs.choice"),  # type: ignore[list-item]
        ({"structured_outputs": StructuredOutputs(choice="ab")}, "structured_outputs.choice"),
        ({"structured_outputs": StructuredOutputs(choice=5)}, "structured_outputs.choice"),  # type: ignore[arg-type]
        ({"structured_outputs": StructuredOutputs(grammar="\ud800")}, "structured_outputs.grammar"),
    ],
)
def test_bad_arguments_are_refused_before_the_call(options: dict, param: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        AsyncClient("127.0.0.1:1").stream("hello", **options)
    assert refused.value.param == param
    assert param.rpartition(".")[2] in refused.value.message


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "half a surrogate \ud800"}, "prompt"),
        ({"prompt": [1, 2, 3]}, "prompt"),
        ({"prompt_ids": [2**32]}, "prompt_ids"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": {"role": "user", "content": "hello"}}, "messages"),
    ],
)
def test_bad_input_is_refused_before_the_call(options: dict, param: str) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        AsyncClient("127.0.0.1:1").stream(**options)
    assert refused.value.param == param
