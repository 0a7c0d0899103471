"""lm-evaluation-harness over /v1/completions and the tokenizer's endpoints: log-likelihoods, whole texts, answers."""

from typing import Any

import httpx
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

CONTEXT = "def add(a, b):"


@pytest.fixture
def harness(base_url: str, model: str) -> Any:
    options = {"base_url": f"{base_url}/completions", "model": model, "num_concurrent": 1, "max_retries": 1}
    return get_model("local-completions")(**options, batch_size=2)


def completed(base_url: str, **body: Any) -> Any:
    answer = httpx.post(f"{base_url}/completions", json={"temperature": 0} | body, timeout=60)
    answer.raise_for_status()
    return answer.json()["choices"][0]


def test_log_likelihoods(harness: Any, base_url: str) -> None:
    """What the target would say is said to be greedy, and every likelihood is that of another way to ask."""
    likely = completed(base_url, prompt=CONTEXT, max_tokens=6)["text"]
    texts = [likely, "\n    return a", " tickets"]
    asked = [Instance("loglikelihood", {}, (CONTEXT, text), at) for at, text in enumerate(texts)]
    told = harness.loglikelihood(asked, disable_tqdm=True)
    for text, (likelihood, is_greedy) in zip(texts, told, strict=True):
        before, after = (harness.tok_encode(each) for each in (CONTEXT, CONTEXT + text))
        other = completed(base_url, prompt=after, max_tokens=0, prompt_logprobs=0)["prompt_logprobs"]
        parts = [other[at][str(after[at])]["logprob"] for at in range(len(before), len(after))]
        assert abs(sum(parts) - likelihood) < 1e-3
        assert is_greedy is (text == likely)


def test_a_whole_text_and_an_answer(harness: Any) -> None:
    (rolled,) = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (3 * CONTEXT,), 0)], True)
    assert rolled < 0
    asked = Instance("generate_until", {}, (CONTEXT, {"until": ["\n"], "max_gen_toks": 8}), 0)
    (text,) = harness.generate_until([asked], disable_tqdm=True)
    assert isinstance(text, str) and "\n" not in text
