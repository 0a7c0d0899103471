"""The demo pair is what its card says: sizes, one tokenizer, a template for plain continuation, held-out prompts."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from models.recipe.pair import CONTEXT_LIMIT
from outrider.lab.models.alpha import measure
from outrider.lab.models.alpha_task import MODEL, AlphaTask, DrafterSpec
from tests.rendering import inline_template

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "models" / "demo"
TEST_PROMPTS = ROOT / "tests" / "data" / "prompts.jsonl"


def read_prompts(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_both_models_read_the_same_text(name: str) -> None:
    assert (DEMO / "target" / name).read_bytes() == (DEMO / "draft" / name).read_bytes()


def test_prompts_are_distinct_and_fit_the_context() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    prompts = read_prompts(TEST_PROMPTS)
    assert len({prompt["id"] for prompt in prompts}) == len({prompt["prompt"] for prompt in prompts}) == 48
    for prompt in prompts:
        assert len(tokenizer.encode(str(prompt["prompt"]))) + 192 <= CONTEXT_LIMIT
    assert all(prompt in prompts for prompt in read_prompts(DEMO / "prompts.jsonl"))


def test_greedy_acceptance_is_near_the_card() -> None:
    drafter, prompts = DrafterSpec(MODEL, str(DEMO / "draft")), [str(p["prompt"]) for p in read_prompts(TEST_PROMPTS)]
    task = AlphaTask(str(DEMO / "target"), [drafter], prompts[:24], 40, [{"temperature": 0.0}])
    with torch.inference_mode():
        *_, measured = measure(task)
    acceptance = measured["rows"][0]["greedy"]["mean"]
    # five standard errors of 960 dependent draws, taken as a third as many independent ones
    assert acceptance == pytest.approx(0.65, abs=5 * 0.48 / math.sqrt(960 / 3))


async def test_the_gateway_renders_a_chat_as_transformers_does() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    template = inline_template((DEMO / "target" / "chat_template.jinja").read_text(), {"eos_token": "<|endoftext|>"})
    chat = [
        {"role": "system", "content": " a\n"},
        {"role": "user", "content": "b "},
        {"role": "assistant", "content": "c"},
    ]
    text = await template.render(chat, add_generation_prompt=True, extra={}, max_chars=1000)
    assert text == tokenizer.apply_chat_template(chat, tokenize=False)
