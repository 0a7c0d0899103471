"""What takes rounds on the fake CUDA device: kinds of drafts, and shapes and rules of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher

from outrider.engine.worker.jobs import SlotVocabulary
from outrider.wire.kinds import AcceptanceRule, Drafter, DraftLogprobs
from outrider.wire.params import BeamParams, SamplingParams
from outrider.wire.speculation import Speculation
from outrider.wire.tree_shape import TreeShape
from target_service.jobs import Verdict
from tests.engine.cuda_pair import Pair
from tests.engine.fake_cuda import FakeCuda, Traffic, Wait

PROMPTS = [[12, 7, 90, 4, 31], [5, 6, 7], [60, 3, 9, 9, 21, 44]]
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0}
COUPLED: dict[str, Any] = {"temperature": 1.0, "acceptance": AcceptanceRule.COUPLED}
SENT: dict[str, Any] = {"draft_logprobs": DraftLogprobs.TOPK, "draft_topk": 8}
CHAIN = Speculation(3, 3, **SENT)
FULL = Speculation(3, 3, draft_logprobs=DraftLogprobs.FULL)
TREE = Speculation(0, 8, tree=TreeShape(widths=(2, 2)), **SENT)
GROWING = Speculation(0, 8, **SENT)
NONE = Speculation()
ROW_BYTES = 320 * 4
"""Of a row of logits."""

LATER = {
    "paged_attention:_group": "indices of rows go up by a copy that waits",
    "paged_attention:_token_indices": "indices of rows go up by a copy that waits",
    "paged_attention:_mask": "finding 6: masks are made on the host and go up by a copy that waits",
    "block_cache:move_tokens": "places of a tree's path go up by a copy that waits, a slot",
}
"""Places of the product that make the host wait once more than a step needs, and why. Each is to leave this list."""


@dataclass(frozen=True)
class Case:
    """A shape and a rule: what slots are opened with."""

    name: str
    params: dict[str, Any]
    speculation: Speculation = CHAIN
    of_target: dict[str, Any] = field(default_factory=dict)
    is_drafted: bool = True
    vocabulary: SlotVocabulary | None = None
    """Of the target, where the draft has another."""
    source_ids: tuple[int, ...] = ()
    """What an encoder reads."""
    max_bytes_down: int = ROW_BYTES
    """What a target's step brings to the host is below."""
    later: frozenset[str] = frozenset()
    """Places of this case that wait once more, until they are mended."""
    brings_logits: bool = False
    """It brings whole rows of logits to the host, until that is mended."""


MODEL_CASES = (
    Case("chain, greedy", GREEDY),
    Case("chain, T = 1", DRAWN),
    Case("chain, T = 1, whole distributions", DRAWN, FULL),
    Case("chain, coupled", COUPLED),
    Case("chain, lenient", {**DRAWN, "lenience": 0.8}),
    Case("chain, greedy, lenient", {**GREEDY, "lenience": 0.8}),
    Case("chain, cuts", {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}),
    Case("chain, penalties", {**GREEDY, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {7: 2.0}}),
    Case("chain, bans", {**DRAWN, "bad_words": ((7, 8), (9,)), "min_tokens": 4, "ignore_eos": False}),
    Case("chain, grammar", {**GREEDY, "grammar": LLMatcher.grammar_from_regex("[a-z]{20,60}"), "ignore_eos": False}),
    Case("chain, log-probs", {**GREEDY, "num_logprobs": 3}),
    Case("chain, T = 1, log-probs", {**DRAWN, "num_logprobs": 3}),
    Case("chain, explained", GREEDY, Speculation(3, 3, explain=True, **SENT)),
    Case("prompt's log-probs", GREEDY, of_target={"num_prompt_logprobs": 2}),
    Case("tree, greedy", GREEDY, TREE),
    Case("tree, T = 1", DRAWN, TREE),
    Case("tree, coupled", COUPLED, TREE),
    Case("tree, cuts", {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}, TREE),
    Case("tree, log-probs", {**GREEDY, "num_logprobs": 3}, TREE),
    Case("growing, greedy", GREEDY, GROWING),
    Case("growing, T = 1", DRAWN, GROWING),
    Case("growing, coupled", COUPLED, GROWING),
    Case("beams", {**GREEDY, "beams": BeamParams(2)}, Speculation(2, 8, **SENT)),
    Case("plain, greedy", GREEDY, NONE, is_drafted=False),
    Case("plain, T = 1", DRAWN, NONE, is_drafted=False),
    Case("own n-grams", GREEDY, GROWING, of_target={"drafter": Drafter.NGRAM}, is_drafted=False),
    Case("own lookahead", GREEDY, GROWING, of_target={"drafter": Drafter.LOOKAHEAD}, is_drafted=False),
    Case("own prediction", GREEDY, GROWING, of_target={"prediction_ids": (9, 21, 44)}, is_drafted=False),
    Case("n-grams & model", GREEDY, TREE, of_target={"drafter": Drafter.NGRAM_AND_MODEL}),
)
HEAD_CASES = (Case("growing, greedy", GREEDY, GROWING), Case("growing, T = 1", DRAWN, GROWING))


@contextmanager
def opened(pair: Pair, case: Case) -> Iterator[None]:
    """Slots of a case, closed in the end."""
    params = SamplingParams(**{"max_tokens": 32, "seed": 3, "ignore_eos": True, **case.params})
    try:
        for number, prompt in enumerate(PROMPTS, start=1):
            pair.open(
                number,
                prompt,
                params,
                case.speculation,
                of_target=case.of_target,
                vocabulary=case.vocabulary,
                source_ids=case.source_ids,
                is_drafted=case.is_drafted,
            )
        yield
    finally:
        pair.close_all()


@dataclass
class Steps:
    """What the steps of a pair did with the device, and their verdicts."""

    draft: list[Traffic] = field(default_factory=list)
    target: list[Traffic] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


def rounds(device: FakeCuda, pair: Pair, num: int = 2) -> Steps:
    """Take a round, in which prompts are fed and lazy things are made, and count in so many more."""
    pair.round()
    found = Steps()
    with pytest.MonkeyPatch.context() as patch:
        for worker, steps in ((pair.draft, found.draft), (pair.target, found.target)):
            patch.setattr(worker, "step", partial(_counted, device, worker.step, steps))
        for _ in range(num):
            found.verdicts += pair.round().values()
    return found


def _counted(device: FakeCuda, step: Callable[[], bool], steps: list[Traffic]) -> bool:
    device.take()
    worked = step()
    traffic = device.take()
    if worked:
        steps.append(traffic)
    return worked


def check(case: Case, steps: Steps) -> None:
    """A step waits for the device once, when its result comes down, and what comes down is small."""
    if case.is_drafted:
        assert steps.draft and sum(verdict.num_drafted for verdict in steps.verdicts)
    for traffic in steps.draft:
        assert len(unexplained(traffic, case)) <= 1, traffic.waits
    for traffic in steps.target:
        assert len(unexplained(traffic, case)) == 1, traffic.waits
        is_small = traffic.num_bytes_down < case.max_bytes_down
        assert is_small or case.brings_logits, f"{traffic.num_bytes_down} bytes came to the host"


def unexplained(traffic: Traffic, case: Case) -> list[Wait]:
    """Return the waits that are not listed."""
    return [wait for wait in traffic.waits if wait.where not in LATER and wait.where not in case.later]
