"""Two published GGUF files, served from the file: their text is transformers' own of the same file, whoever drafts.

`make chat` fetches the one (SmolLM2 135M, Q4_1) and `make real-model` the other (Gemma 3 270M, Q4_K_M: its blocks are
of four kinds). What is not there is skipped. A minute and a half for each.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

import tests.stack
from models.chat.fetch import chat_model
from models.real.make import GGUF, real_model
from outrider.client import Client, Drafter, Speculation
from outrider.engine.files.tokenizer_files import read_tokenizer
from tests.e2e.reference import NEAR_TIE, compare, judge
from tests.stack import Stack, running

FILES = {"smollm2": chat_model(), "gemma3": real_model() / "gguf" / GGUF}
NUM_PROMPTS, MAX_TOKENS = 4, 32

OTHERS = (
    "In 1969, 3 men flew 384,400 km to the moon; 12 years later",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=FILES)
def file(request: pytest.FixtureRequest) -> Path:
    path = FILES[request.param]
    if not path.is_file():
        pytest.skip(f"no {path}; say make chat and make real-model")
    return path


@pytest.fixture(scope="module")
def stack(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests.stack, "START_S", 900.0)
        with running(str(file), None, log_folder=tmp_path_factory.mktemp("gguf")) as started:
            yield started


def test_every_token_is_that_of_transformers(file: Path, stack: Stack, dev_prompts: list[str]) -> None:
    prompts = [*dev_prompts[: NUM_PROMPTS - len(OTHERS)], *OTHERS]
    expected = judge(str(file), generate=prompts, max_tokens=MAX_TOKENS, timeout_s=1800).answers
    for speculation in (False, Speculation(drafter=Drafter.NGRAM, num_draft_tokens=4)):
        with Client(stack.grpc, timeout_s=600) as client:
            for prompt, answer in zip(prompts, expected, strict=True):
                found = client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, speculation=speculation)
                assert found.usage.num_prompt_tokens == len(answer.prompt_ids)
                difference = compare(answer, [token.id for token in found.choices[0].tokens])
                assert difference is None or difference.gap < NEAR_TIE, difference


def test_a_chat_is_rendered_by_the_files_own_template(file: Path, stack: Stack) -> None:
    how = {"max_tokens": 12, "temperature": 0}
    messages = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    reply = httpx.post(f"{stack.http}/v1/chat/completions", json=messages | how, timeout=600)
    if "smol" not in file.name.lower():  # a base model without a template
        assert reply.status_code == 400 and "template" in reply.text
        return
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]
    assert reply.json()["choices"][0]["finish_reason"] == "stop"  # by the end that the file names


def test_texts_come_back_from_its_tokens(file: Path) -> None:
    tokenizer = Tokenizer.from_buffer(read_tokenizer(str(file)).files.tokenizer_json)
    for text in ("Grüße aus München, 你好 😀\n\n  12,345", "def f(x):\n    return x ** 2\n", "<|im_start|>user\nhi"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
