"""Draws answers of many cases through a gateway, all in the same batches, and counts what came."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.client import AsyncClient, Choice, Drafter
from tests.law.cases import CHOICES_PER_CALL, NUM_ANSWERS, PREDICTIONS, PROMPT, STRUCTURED, Case
from tests.law.chi_square import Window
from tests.law.expected import Answer

CALLS_AT_ONCE = 6
"""96 answers: the gateway runs 64 of them and has the next ones waiting."""


@dataclass
class Sample:
    """Answers of one case."""

    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    """By (seed, choice)."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Tokens by kind."""
    num_rounds: int = 0
    num_plain_steps: int = 0
    num_wasted_tokens: int = 0

    def add(self, seed: int, choice: Choice) -> None:
        self.answers[seed, choice.index] = tuple(token.id for token in choice.tokens)
        self.kinds.update(token.kind.value for token in choice.tokens)
        self.num_rounds += choice.usage.num_rounds
        self.num_plain_steps += choice.usage.num_plain_steps
        self.num_wasted_tokens += choice.usage.num_wasted_tokens

    def counts(self, window: Window) -> Counter[Answer]:
        return Counter(window(answer) for answer in self.answers.values())


def draw(address: str, cases: Iterable[Case], num_answers: int = NUM_ANSWERS) -> dict[str, Sample]:
    """`num_answers` of each case from the gateway at `address`, by case id. Calls of the cases take turns."""
    return asyncio.run(_draw(address, list(cases), num_answers))


async def _draw(address: str, cases: list[Case], num_answers: int) -> dict[str, Sample]:
    samples = {case.id: Sample() for case in cases}
    calls = itertools.product(range(num_answers // CHOICES_PER_CALL), cases)
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for _ in range(CALLS_AT_ONCE):
            group.create_task(_work(client, calls, samples))
    return samples


async def _work(client: AsyncClient, calls: Iterable[tuple[int, Case]], samples: dict[str, Sample]) -> None:
    for number, case in calls:
        seed = case.first_seed + number
        for choice in await _call(client, case, seed):
            samples[case.id].add(seed, choice)


async def _call(client: AsyncClient, case: Case, seed: int) -> tuple[Choice, ...]:
    p, drafter = case.params, case.speculation.drafter
    predicts = isinstance(drafter, Drafter) and drafter in (Drafter.PREDICTION, Drafter.PREDICTION_MODEL)
    completion = await client.generate(
        prompt_ids=PROMPT,
        n=CHOICES_PER_CALL,
        seed=seed,
        speculation=case.speculation,
        max_tokens=p.max_tokens,
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        logit_bias=p.logit_bias,
        bad_words=p.bad_words,
        min_tokens=p.min_tokens,
        stop_token_ids=p.stop_token_ids,
        ignore_eos=p.ignore_eos,
        structured_outputs=STRUCTURED.get(p.grammar),
        prediction=PREDICTIONS[p.grammar] if predicts else "",
    )
    return completion.choices
