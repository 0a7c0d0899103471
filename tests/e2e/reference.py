"""What the target alone says, by transformers itself in processes of its own, which stay.

`generate` runs transformers' own `generate`, greedy, one prompt at a time, as the demo's judge does. `check` is for
outputs whose length is not known beforehand: one forward over prompt and output says whether each id is the best one
after those before it, which by induction is the same as being what `generate` would say.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from tests.forked import CONTEXT

if TYPE_CHECKING:  # torch is for the process that judges
    from outrider.lab.models.reference_generate import Reference

NEAR_TIE = 1e-3
"""A first difference is forgiven (and listed) where the two best logits are closer than this."""


@dataclass(frozen=True)
class Answer:
    """Of `generate`. `gaps[i]` is the distance of the two best logits at output position i."""

    prompt_ids: list[int]
    ids: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Difference:
    """Where an output first leaves the reference. None: that side has ended."""

    position: int
    expected: int | None
    found: int | None
    gap: float

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE


@dataclass(frozen=True)
class Judgement:
    answers: list[Answer] = field(default_factory=list)
    """One per prompt of `generate`."""
    checks: list[Difference | None] = field(default_factory=list)
    """One per output of `check`; None where every id is the target's own."""


def compare(expected: Answer, found: Sequence[int]) -> Difference | None:
    """The first difference, or None."""
    for position, (one, other) in enumerate(itertools.zip_longest(expected.ids, found)):
        if one != other:
            return Difference(position, one, other, expected.gaps[min(position, len(expected.gaps) - 1)])
    return None


def judge(
    model: str,
    *,
    generate: Sequence[str] = (),
    max_tokens: int = 128,
    check: Sequence[tuple[str, Sequence[int]]] = (),
    timeout_s: float = 600.0,
) -> Judgement:
    """Ask the reference processes, one a core: each takes a share of prompts and outputs."""
    outputs = [(prompt, list(ids)) for prompt, ids in check]
    count = min(len(os.sched_getaffinity(0)), max(len(generate), len(outputs), 1))
    submit = _processes().submit
    shares = [submit(_judge, model, generate[i::count], max_tokens, outputs[i::count]) for i in range(count)]
    found = [share.result(timeout_s) for share in shares]
    return Judgement(
        [found[i % count].answers[i // count] for i in range(len(generate))],
        [found[i % count].checks[i // count] for i in range(len(outputs))],
    )


@dataclass(frozen=True)
class Searched:
    """An answer of a beam search by transformers."""

    ids: list[int]
    score: float


def beams(
    model: str, prompts: Sequence[str], width: int, max_tokens: int, length_penalty: float, early_stopping: bool | str
) -> list[list[Searched]]:
    """Ask the reference processes: `width` answers to each prompt, best first."""
    rest = (width, max_tokens, length_penalty, early_stopping)
    shares = [_processes().submit(_beams, model, prompt, *rest) for prompt in prompts]
    return [share.result(600.0) for share in shares]


def _beams(
    model: str, prompt: str, width: int, max_tokens: int, length_penalty: float, early_stopping: bool | str
) -> list[Searched]:
    """In the other process."""
    found = _reference(model).search(prompt, width, max_tokens, length_penalty, early_stopping)
    return [Searched(*each) for each in found]


def assert_target_alone(model: str, *outputs: tuple[str, Sequence[int]]) -> None:
    """Each (prompt, output ids) is what the target alone would say, greedily."""
    for (prompt, ids), difference in zip(outputs, judge(model, check=outputs).checks, strict=True):
        assert difference is None or difference.near_tie, f"after {prompt[-40:]!r} and {len(ids)} tokens: {difference}"


@functools.cache
def _processes() -> ProcessPoolExecutor:
    """Return the processes that judge, which last as long as the tests: each loads a model once."""
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=CONTEXT)


def _first_wrong(reference: Reference, prompt: str, ids: list[int]) -> Difference | None:
    """Where the forward over prompt and output puts another id first."""
    import torch

    prompt_ids = reference.tokenizer(prompt)["input_ids"]
    with torch.inference_mode():
        logits = reference.model(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]  # [n, V]
    for position, (found, row) in enumerate(zip(ids, logits, strict=True)):
        two = row.topk(2)
        if int(two.indices[0]) != found:
            return Difference(position, int(two.indices[0]), found, float(two.values[0] - two.values[1]))
    return None


def _judge(model: str, prompts: Sequence[str], max_tokens: int, outputs: list[tuple[str, list[int]]]) -> Judgement:
    """In the other process."""
    reference = _reference(model)
    answers = [Answer(**asdict(reference.generate(prompt, max_tokens))) for prompt in prompts]
    return Judgement(answers, [_first_wrong(reference, prompt, ids) for prompt, ids in outputs])


@functools.lru_cache(maxsize=1)
def _reference(model: str) -> Reference:
    """In the other process."""
    import torch
    from transformers.utils import logging as transformers_logging

    from outrider.lab.models.reference_generate import Reference

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    return Reference(model)
