"""A published model with a vocabulary of 262,144, sliding windows and a tied head, served: its text is transformers'
own, whoever drafts. Skipped where `make real-model` has not been said; `make real-test` runs all of it.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import tests.stack
from models.real.make import real_head, real_model, why_absent
from outrider.client import Client, Completion, Drafter, Speculation
from tests.e2e.reference import NEAR_TIE, Answer, Difference, compare, judge
from tests.stack import Stack, running

WINDOW = 512
NUM_SHORT, NUM_LONG = 20, 4
"""Prompts; the long ones are over two windows."""
NUM_EVERYDAY = 1
"""Of each, where the slow tests are left out."""
MAX_TOKENS, MAX_TOKENS_EVERYDAY = 64, 16
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

pytestmark = [
    pytest.mark.skipif(why_absent() is not None, reason=why_absent() or "it is there"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def patience() -> Iterator[None]:
    """It takes some seconds to load and to test, and minutes beside other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests.stack, "START_S", 900.0)
        yield


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, patience: None) -> Iterator[Stack]:
    """Each request says who drafts: the target itself, or a draft worker with the head, where there is one. The model
    has no chat template; a file gives one.
    """
    folder = tmp_path_factory.mktemp("real")
    (folder / "chat.jinja").write_text(TEMPLATE)
    head = str(real_head()) if has_head() else None
    with running(
        str(real_model()),
        head,
        draft_args=("--target-model", str(real_model())),
        gateway_args=("--chat-template", str(folder / "chat.jinja")),
        log_folder=folder,
    ) as started:
        yield started


def has_head() -> bool:
    return (real_head() / "config.json").is_file()


@pytest.fixture(scope="module")
def prompts(dev_prompts: list[str], every_day: bool) -> list[str]:
    short, rest = dev_prompts[:NUM_SHORT], dev_prompts[NUM_SHORT:]
    size = len(rest) // NUM_LONG
    long = ["\n\n".join(rest[first * size : (first + 1) * size]) for first in range(NUM_LONG)]
    count = NUM_EVERYDAY if every_day else None
    return [*short[:count], *long[:count]]


@pytest.fixture(scope="module")
def max_tokens(every_day: bool) -> int:
    return MAX_TOKENS_EVERYDAY if every_day else MAX_TOKENS


@pytest.fixture(scope="module")
def expected(prompts: list[str], max_tokens: int) -> list[Answer]:
    """By transformers in other processes."""
    answers = judge(str(real_model()), generate=prompts, max_tokens=max_tokens, timeout_s=1800).answers
    assert sum(len(answer.prompt_ids) > 2 * WINDOW for answer in answers) >= len(prompts) // (NUM_SHORT + NUM_LONG) + 1
    return answers


@dataclass(frozen=True)
class Said:
    """What came to all prompts, one after the other."""

    answers: list[Completion]
    seconds: float

    def report(self, name: str, expected: Sequence[Answer], differences: dict[int, Difference]) -> str:
        usages = [answer.usage for answer in self.answers]
        drafted, accepted = (sum(getattr(u, f"num_{what}_tokens") for u in usages) for what in ("draft", "accepted"))
        tokens = sum(usage.num_completion_tokens for usage in usages)
        passes = sum(usage.num_rounds + usage.num_plain_steps for usage in usages)
        kept = f"{accepted / drafted:.3f} of {drafted} drafts accepted" if drafted else "nothing drafted"
        head = (
            f"{name}: {len(expected) - len(differences)} of {len(expected)} answers equal, {kept}, "
            f"{tokens / passes:.2f} tokens a pass, {tokens / self.seconds:.1f} tokens/s with prompts"
        )
        ties = [
            f"  prompt {i} position {d.position}: expected {d.expected}, found {d.found}, top-2 gap {d.gap:.2e}"
            for i, d in sorted(differences.items())
        ]
        return "\n".join([head, *ties])


def said(stack: Stack, prompts: Sequence[str], max_tokens: int, wish: Speculation | bool) -> Said:
    began_s = time.monotonic()
    with Client(stack.grpc, timeout_s=600) as client:
        answers = [client.generate(p, max_tokens=max_tokens, temperature=0.0, speculation=wish) for p in prompts]
    return Said(answers, time.monotonic() - began_s)


def wait_until_it_drafts(stack: Stack, wish: Speculation) -> None:
    """A head is tested first, which takes seconds."""
    give_up = time.monotonic() + 120
    while not said(stack, ["import os\n"], 8, wish).answers[0].usage.num_draft_tokens:
        assert stack.draft is not None and time.monotonic() < give_up, stack.draft and stack.draft.log()[-2000:]
        time.sleep(0.5)


@pytest.mark.parametrize("drafter", [None, Drafter.NGRAM, Drafter.LOOKUP, Drafter.MODEL], ids=str)
def test_every_token_is_the_targets_own(
    stack: Stack,
    prompts: list[str],
    max_tokens: int,
    expected: list[Answer],
    drafter: Drafter | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if drafter is Drafter.MODEL and not has_head():
        pytest.skip(f"no head in {real_head()}; say make real-head")
    wish = False if drafter is None else Speculation(drafter=drafter, num_draft_tokens=4)
    if drafter is Drafter.MODEL:
        wait_until_it_drafts(stack, Speculation(drafter=drafter, num_draft_tokens=4))
    found = said(stack, prompts, max_tokens, wish)
    ids = [[token.id for token in answer.choices[0].tokens] for answer in found.answers]
    compared = [compare(answer, each) for answer, each in zip(expected, ids, strict=True)]
    differences = {index: each for index, each in enumerate(compared) if each is not None}
    with capsys.disabled():  # near-ties are listed even when all is well
        print(f"\n{found.report(drafter or 'no draft', expected, differences)}")
    assert all(difference.gap < NEAR_TIE for difference in differences.values())
    assert any(answer.usage.num_accepted_tokens for answer in found.answers) is (drafter is not None)


def test_a_chat_with_a_template_from_a_file(stack: Stack) -> None:
    """It is what follows the rendered text, in which the beginning of sequence stands once."""
    body = {"messages": [{"role": "user", "content": "Name the capital of Italy."}]}
    how = {"max_tokens": 16, "temperature": 0, "stop": ["\n"]}
    reply = httpx.post(f"{stack.http}/v1/chat/completions", json=body | how, timeout=600).json()
    rendered = "user: Name the capital of Italy.\nassistant:"
    plain = httpx.post(f"{stack.http}/v1/completions", json={"prompt": rendered} | how, timeout=600).json()
    assert reply["choices"][0]["message"]["content"] == plain["choices"][0]["text"] != ""
    assert reply["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_what_it_is_served_as(stack: Stack) -> None:
    info = stack.target_info()
    assert (info.vocab_size, info.context_limit, list(info.eos_token_ids)) == (262144, 32768, [1])
    assert info.supports_trees and info.supports_features, info.features_refusal
    assert Path(info.model_id) == real_model()
