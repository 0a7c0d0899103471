"""What takes rounds on the fake CUDA device: kinds of drafts, and shapes and rules of steps."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher

from outrider.engine.worker.jobs import SlotVocabulary
from outrider.wire.kinds import AcceptanceRule, DraftLogprobs
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import BeamParams, SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from target_service.leases.lease_jobs import Verdict
from tests.unit.outrider.engine.cuda.cuda_pair import Pair
from tests.unit.outrider.engine.cuda.fake_cuda import FakeCuda, Traffic, Wait

PROMPTS = ((12, 7, 90, 4, 31), (5, 6, 7), (60, 3, 9, 9, 21, 44))
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0}
COUPLED: dict[str, Any] = {"temperature": 1.0, "acceptance": AcceptanceRule.COUPLED}
SENT: dict[str, Any] = {"draft_logprobs": DraftLogprobs.TOPK, "draft_topk": 8}
CHAIN = Speculation(3, 3, **SENT)
FULL = Speculation(3, 3, draft_logprobs=DraftLogprobs.FULL)
TREE = Speculation("auto", 8, tree=TreeShape(widths=(2, 2)), **SENT)
GROWING = Speculation("auto", 8, **SENT)
NONE = Speculation()
EXPLAINED = Speculation(3, 3, explain=True, **SENT)
MAX_MORE = 6
"""Rounds more for drafts to pay."""
ROW_BYTES = 320 * 4
"""Of a row of logits."""

LATER = {
    "features:_project": "rows of features are made of what was accepted, and come down once more for all heads",
    "own_heads:_run_heads": "the target's own heads read these rows: logits come down once more, all slots' together",
    "pass_drafter:propose": "logits behind look-ahead embeddings come down once more, all slots' together",
    "lookahead:_window": "guesses of windows come down once more, all slots' together",
    "explaining:explain": "what explains a step is read from rows of logits once the step is decided",
    "dense:_forward_one": "transformers asks a mask of padded columns for its values",
}
"""Places that make the host wait more than a step needs, and why they still do. What is mended leaves this list."""
SOMETIMES = {"dense:_forward_one"}
"""Those that wait where rows happen to be padded."""


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
    prompts: Sequence[Sequence[int]] = PROMPTS
    source_ids: tuple[int, ...] = ()
    """What an encoder reads."""
    max_bytes_down: int = ROW_BYTES
    """What a target's step brings to the host is below."""
    later: tuple[str, ...] = ()
    """Places of `LATER` that wait in the steps of this case."""
    brings_logits: bool = False
    """Whole rows of logits still come to the host."""


CUTS: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
PENALTIES: dict[str, Any] = {**GREEDY, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {7: 2.0}}
BANS: dict[str, Any] = {**DRAWN, "bad_words": ((7, 8), (9,)), "min_tokens": 4, "ignore_eos": False}
LETTERS: dict[str, Any] = {"grammar": LLMatcher.grammar_from_regex("[a-z]{20,60}"), "ignore_eos": False}
LOGPROBS: dict[str, Any] = {**GREEDY, "num_logprobs": 3}
SEVENS: dict[str, Any] = {**GREEDY, "logit_bias": {7: 100.0}}
"""The output is 7 for ever: who counts or predicts has something to propose."""
NGRAMS, LOOKAHEAD = {"drafter": Drafter.NGRAM}, {"drafter": Drafter.LOOKAHEAD}

MODEL_CASES = (
    Case("chain, greedy", GREEDY),
    Case("chain, T = 1", DRAWN),
    Case("chain, T = 1, whole distributions", DRAWN, FULL),
    Case("chain, coupled", COUPLED),
    Case("chain, lenient", {**DRAWN, "lenience": 0.8}),
    Case("chain, greedy, lenient", {**GREEDY, "lenience": 0.8}),
    Case("chain, cuts", CUTS),
    Case("chain, penalties", PENALTIES),
    Case("chain, bans", BANS),
    Case("chain, grammar", {**GREEDY, **LETTERS}),
    Case("chain, log-probs", LOGPROBS),
    Case("chain, T = 1, log-probs", {**DRAWN, "num_logprobs": 3}),
    Case("chain, explained", GREEDY, EXPLAINED, later=("explaining:explain",), brings_logits=True),
    Case("prompt's log-probs", GREEDY, of_target={"num_prompt_logprobs": 2}),
    Case("tree, greedy", GREEDY, TREE),
    Case("tree, T = 1", DRAWN, TREE),
    Case("tree, coupled", COUPLED, TREE),
    Case("tree, cuts", CUTS, TREE),
    Case("tree, bans", BANS, TREE),
    Case("tree, grammar", {**DRAWN, **LETTERS}, TREE),
    Case("tree, log-probs", LOGPROBS, TREE, max_bytes_down=2 * ROW_BYTES),
    Case("growing, greedy", GREEDY, GROWING),
    Case("growing, T = 1", DRAWN, GROWING),
    Case("growing, coupled", COUPLED, GROWING),
    Case("beams", {**GREEDY, "beams": BeamParams(2)}, Speculation(2, 8, **SENT)),
    Case("plain, greedy", GREEDY, NONE, is_drafted=False),
    Case("plain, T = 1", DRAWN, NONE, is_drafted=False),
    Case("own n-grams", SEVENS, CHAIN, NGRAMS, is_drafted=False, prompts=((5, *[7] * 8),)),
    Case("own prediction", SEVENS, CHAIN, {"prediction_ids": (7,) * 8}, is_drafted=False),
    Case("own lookahead", SEVENS, CHAIN, LOOKAHEAD, is_drafted=False, later=("lookahead:_window",)),
    Case("n-grams & model", GREEDY, TREE, {"drafter": Drafter.NGRAM_AND_MODEL}),
)


@contextmanager
def opened(pair: Pair, case: Case) -> Iterator[None]:
    """Slots of a case, closed in the end."""
    params = SamplingParams(**{"max_tokens": 32, "seed": 3, "ignore_eos": True, **case.params})
    try:
        for number, prompt in enumerate(case.prompts, start=1):
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

    @property
    def num_drafted(self) -> int:
        return sum(verdict.num_drafted for verdict in self.verdicts)


def rounds(device: FakeCuda, pair: Pair, case: Case, num: int = 2) -> Steps:
    """Take a round, in which prompts are fed and lazy things are made, and count in so many more; in a few beyond these
    where a growing tree did not pay, which is a matter of time.
    """
    pair.round()
    found = Steps()
    with pytest.MonkeyPatch.context() as patch:
        for worker, steps in ((pair.draft, found.draft), (pair.target, found.target)):
            patch.setattr(worker, "step", partial(_counted, device, worker.step, steps))
        for _ in range(num):
            found.verdicts += pair.round().values()
        for _ in range(0 if case.speculation is NONE else MAX_MORE):
            if found.num_drafted:
                break
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
    """A step waits for the device once, when its result comes down, and once at each place of `LATER` of its case; what
    comes down is small.
    """
    assert steps.num_drafted or case.speculation is NONE
    assert len(steps.draft) > 0 or not case.is_drafted
    for traffic in steps.draft:
        assert len(_unlisted(traffic)) <= 1, traffic.waits
    for traffic in steps.target:
        assert traffic.waits and len(_unlisted(traffic)) <= 1, traffic.waits
    for traffic in (*steps.draft, *steps.target):
        places = Counter(wait.where for wait in traffic.waits)
        assert all(places[place] <= 1 for place in LATER.keys() - SOMETIMES), traffic.waits
    seen = {wait.where for traffic in (*steps.draft, *steps.target) for wait in traffic.waits}
    assert seen & LATER.keys() - SOMETIMES == set(case.later), "the list of what waits is not what waits"
    num_bytes = max(traffic.num_bytes_down for traffic in steps.target)
    assert (num_bytes >= case.max_bytes_down) == case.brings_logits, f"{num_bytes} bytes came to the host in a step"


def _unlisted(traffic: Traffic) -> list[Wait]:
    return [wait for wait in traffic.waits if wait.where not in LATER]
