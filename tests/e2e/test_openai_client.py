"""The official `openai` client against the real system."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.reference import judge
from tests.stack import DEMO_TARGET, Process, Stack, gateway_beside

PROMPT = "def read_file(path):\n    with open(path) as file:\n"
CHAT: Any = [{"role": "system", "content": "Answer in Python."}, {"role": "user", "content": "def add(a, b):"}]


def client_of(gateway: Process) -> OpenAI:
    return OpenAI(base_url=f"http://{gateway.ready['http']}/v1", api_key="any", max_retries=0, timeout=100)


@pytest.fixture(scope="module")
def patient(stack: Stack) -> Iterator[Process]:
    """Another gateway before the same workers, that lets draft and target take turns: no draft is late, so that under
    `rejection` a seed gives the same text again.
    """
    with gateway_beside(stack, module="tests.turns_gateway") as gateway:
        yield gateway


@pytest.fixture
def client(patient: Process) -> Iterator[OpenAI]:
    with client_of(patient) as made:
        yield made


@pytest.fixture(scope="module")
def model(stack: Stack) -> str:
    return stack.model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_TARGET)


@pytest.fixture(scope="module")
def expected(tokenizer: Any) -> str:
    """What the target alone makes of PROMPT in 48 tokens."""
    (answer,) = judge(DEMO_TARGET, generate=[PROMPT], max_tokens=48).answers
    return str(tokenizer.decode(answer.ids, skip_special_tokens=True))


def completion(client: OpenAI, model: str, **options: Any) -> Any:
    return client.completions.create(
        **{"model": model, "prompt": PROMPT, "max_tokens": 48, "temperature": 0, **options}
    )


def test_a_completion_and_what_speculation_did(client: OpenAI, model: str, expected: str, tokenizer: Any) -> None:
    answer = completion(client, model)
    (choice,) = answer.choices
    assert choice.text == expected
    assert choice.finish_reason == "length"
    usage, what = answer.usage, answer.usage.speculation
    assert usage.prompt_tokens == len(tokenizer(PROMPT)["input_ids"])
    assert usage.completion_tokens == 48
    assert usage.total_tokens == usage.prompt_tokens + 48
    assert 0 < what["num_accepted_tokens"] < what["num_draft_tokens"]
    assert usage.completion_tokens_details.accepted_prediction_tokens == 0, "nothing was predicted"
    assert usage.completion_tokens_details.rejected_prediction_tokens == 0
    assert what["acceptance_rate"] == what["num_accepted_tokens"] / what["num_draft_tokens"]
    assert what["mean_accepted_length"] == 1 + what["num_accepted_tokens"] / what["num_rounds"]


def test_a_chat_whole_and_streamed(client: OpenAI, model: str, tokenizer: Any) -> None:
    options: Any = {"model": model, "messages": CHAT, "max_completion_tokens": 32, "temperature": 0}
    answer = client.chat.completions.create(**options)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    templated = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    (alone,) = judge(DEMO_TARGET, generate=[templated], max_tokens=32).answers
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(alone.prompt_ids)
    assert choice.message.content == tokenizer.decode(alone.ids, skip_special_tokens=True)
    with client.chat.completions.create(**options, stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content


@pytest.fixture(scope="module")
def scores(tokenizer: Any) -> Any:
    """text, output ids -> [num_output, V] float32, transformers' log_softmax of the target's logits."""
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)

    def score(text: str, output_ids: list[int]) -> torch.Tensor:
        prompt_ids = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            logits = target(torch.tensor([[*prompt_ids, *output_ids]])).logits[0, len(prompt_ids) - 1 : -1]
        return logits.log_softmax(-1)

    return score


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_of_a_completion_are_the_targets_own(
    client: OpenAI, model: str, tokenizer: Any, scores: Any, temperature: float
) -> None:
    """Of the unmodified distribution: neither temperature nor penalties show."""
    options = {"temperature": temperature, "seed": 3, "presence_penalty": 0.5}
    (choice,) = completion(client, model, logprobs=5, **options).choices
    told = choice.logprobs
    ids = [id_of(tokenizer, token) for token in told.tokens]
    assert "".join(told.tokens) == choice.text
    rows = scores(PROMPT, ids)
    for position, (token_id, row) in enumerate(zip(ids, rows, strict=True)):
        assert told.token_logprobs[position] == pytest.approx(float(row[token_id]), abs=1e-3)
        best = {id_of(tokenizer, text): value for text, value in told.top_logprobs[position].items()}
        assert len(best) in (5, 6)  # the chosen one is always among them
        for other, value in best.items():
            assert value == pytest.approx(float(row[other]), abs=1e-3)
        assert sorted(best.values())[-5:] == pytest.approx(sorted(row.topk(5).values.tolist()), abs=1e-3)
    offsets = [0]
    for token in told.tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    assert told.text_offset == offsets


def id_of(tokenizer: Any, text: str) -> int:
    """Of a token by its text, which for these prompts is printable ASCII and unambiguous."""
    found = tokenizer.convert_tokens_to_ids("".join({" ": "Ġ", "\n": "Ċ", "\t": "ĉ"}.get(c, c) for c in text))
    assert isinstance(found, int), text
    return found


def test_the_prompts_log_probs_are_transformers_own(client: OpenAI, model: str, tokenizer: Any) -> None:
    """Of several prompts at once, as harnesses send them, in OpenAI's form and in vLLM's."""
    prompts = [PROMPT, PROMPT * 4 + "    return file.read()\n", "x"]
    options = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = completion(client, model, **options, extra_body={"prompt_logprobs": 0})
    network = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32).eval()
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        with torch.inference_mode():
            laws = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(dim=1)
        expected = laws[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        told = choice.logprobs.token_logprobs
        assert choice.text == prompt and told[0] is None and len(told) == len(ids)
        assert told[1:] == pytest.approx(expected, abs=1e-4)
        assert sum(told[1:]) == pytest.approx(sum(expected), abs=1e-3)
        by_id = [
            each[str(token_id)]["logprob"] for each, token_id in zip(choice.prompt_logprobs[1:], ids[1:], strict=True)
        ]
        assert by_id == told[1:]
        is_best = [
            max(top.values()) == own for top, own in zip(choice.logprobs.top_logprobs[1:], told[1:], strict=True)
        ]
        assert is_best == [int(law.argmax()) == token_id for law, token_id in zip(laws[:-1], ids[1:], strict=True)]
