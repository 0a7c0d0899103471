"""Greedy text over HTTP is, token for token, what transformers' own `generate` makes of the target alone."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from tests.e2e.reference import NEAR_TIE, Answer, Difference, compare, judge
from tests.stack import DEMO_TARGET, Stack

NUM_PROMPTS = 24
NUM_EVERYDAY = 10
"""Of them, where the slow tests are left out."""
MAX_TOKENS = 128
ENDINGS = [
    'if __name__ == "__main__":\n    unittest.main()\n',
    "def test_main():\n    support.run_unittest(TestCase)\n\nif __name__ ==",
    "        self.assertEqual(a, b)\n\n\nif __name__ ==",
]
"""Texts after which the target says its end of sequence within MAX_TOKENS."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def prompts(dev_prompts: list[str], every_day: bool) -> list[str]:
    return [*dev_prompts[: NUM_EVERYDAY if every_day else NUM_PROMPTS], *ENDINGS]


@pytest.fixture(scope="module")
def expected(prompts: list[str]) -> list[Answer]:
    """Made by transformers in another process."""
    answers = judge(DEMO_TARGET, generate=prompts, max_tokens=MAX_TOKENS).answers
    num_endless = len(prompts) - len(ENDINGS)
    assert [len(answer.ids) for answer in answers[:num_endless]].count(MAX_TOKENS) > num_endless / 2
    assert all(len(answer.ids) < MAX_TOKENS for answer in answers[num_endless:])  # these do end
    return answers


@pytest.fixture(scope="module")
def ids_by_label() -> dict[str, int]:
    """The label of a token in `logprobs.tokens` names exactly one id, so HTTP's answers can be compared by id."""
    files = pb.TokenizerFiles()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with open(f"{DEMO_TARGET}/{name}", "rb") as file:
            setattr(files, name.replace(".", "_"), file.read())
    tokenizer = Tokenizer.from_files(files)
    labels = {_label(tokenizer, token_id): token_id for token_id in range(tokenizer.vocab_size)}
    assert len(labels) == tokenizer.vocab_size
    return labels


def _label(tokenizer: Tokenizer, token_id: int) -> str:
    text, raw = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
    if "\ufffd" in text and raw is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


async def complete_all(stack: Stack, prompts: Sequence[str], k: int, concurrency: int) -> list[dict[str, Any]]:
    """Whole answers in the order of the prompts, at most `concurrency` at once."""
    places = asyncio.Semaphore(concurrency)

    async def one(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 0}
        async with places:
            reply = await client.post("/v1/completions", json=body | {"speculation": {"num_draft_tokens": k}})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async with httpx.AsyncClient(base_url=stack.http, timeout=300) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in prompts))


@pytest.mark.parametrize(
    ("k", "concurrency"),
    [(4, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product((1, 4, 8), (1, 8)))],
)
async def test_every_token_is_the_targets_own(
    stack: Stack,
    prompts: list[str],
    expected: list[Answer],
    ids_by_label: dict[str, int],
    k: int,
    concurrency: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bodies = await complete_all(stack, prompts, k, concurrency)
    differences: dict[int, Difference] = {}
    for index, (body, answer) in enumerate(zip(bodies, expected, strict=True)):
        choice = body["choices"][0]
        ids = [ids_by_label[label] for label in choice["logprobs"]["tokens"]]
        assert len(ids) == body["usage"]["completion_tokens"]
        difference = compare(answer, ids)
        if difference is not None:
            differences[index] = difference
            continue
        assert choice["finish_reason"] == ("length" if len(ids) == MAX_TOKENS and ids[-1] != 0 else "stop")
    with capsys.disabled():  # near-ties are listed even when all is well
        print(f"\n{table(k, concurrency, expected, differences)}")
    assert all(difference.near_tie for difference in differences.values())
    speculation = [body["usage"]["speculation"] for body in bodies]
    assert sum(each["num_draft_tokens"] for each in speculation) > 0.5 * k * sum(
        each["num_rounds"] for each in speculation
    )
    assert sum(each["num_accepted_tokens"] for each in speculation) > 0


def table(k: int, concurrency: int, expected: list[Answer], differences: dict[int, Difference]) -> str:
    compared = sum(len(a.ids) if i not in differences else differences[i].position for i, a in enumerate(expected))
    head = (
        f"K={k} concurrency={concurrency}: {len(expected)} prompts, {compared} tokens compared, "
        f"{len(expected) - len(differences)} answers equal, {len(differences)} differ (near-tie below {NEAR_TIE:g})"
    )
    rows = [
        f"  prompt {i} position {d.position}: expected {d.expected}, found {d.found}, top-2 gap {d.gap:.2e}"
        for i, d in sorted(differences.items())
    ]
    return "\n".join([head, *rows])
