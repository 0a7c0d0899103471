"""What is asked, and the right answers: those of the same system before anything happens to it."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.client import AcceptanceRule, AsyncClient, Drafter, GenerateOptions, Speculation

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"
CONCURRENCY = 8
LONGEST_PROMPT, SHORTEST_PROMPT = 1200, 60
"""Characters."""
LONGEST_ANSWER, SHORTEST_ANSWER = 400, 20
"""Tokens."""


@dataclass(frozen=True)
class Question:
    prompt: str
    max_tokens: int
    temperature: float
    """Of who asks with coupled acceptance: the answer is then as fixed as a greedy one."""
    seed: int

    def coupled(self, *, speculate: bool, drafter: Drafter | None = None) -> GenerateOptions:
        wishes = Speculation(enabled=speculate, acceptance=AcceptanceRule.COUPLED, drafter=drafter)
        return {"temperature": self.temperature, "seed": self.seed, "speculation": wishes}


@dataclass(frozen=True)
class Answer:
    """By plain decoding."""

    ids: tuple[int, ...]
    """Greedy."""
    text: str
    coupled_ids: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    question: Question
    answer: Answer


def questions(seed: int, count: int) -> list[Question]:
    """Of mixed lengths, each prompt a development prompt's end."""
    dice = random.Random(f"{seed}/questions")
    prompts = [str(json.loads(line)["prompt"]) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [
        Question(
            prompts[index % len(prompts)][-dice.randint(SHORTEST_PROMPT, LONGEST_PROMPT) :],
            dice.randint(SHORTEST_ANSWER, LONGEST_ANSWER),
            dice.uniform(0.3, 1.2),
            dice.getrandbits(64),
        )
        for index in range(count)
    ]


async def answered(address: str, asked: Sequence[Question]) -> list[Asked]:
    """Over gRPC, without drafts."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(client: AsyncClient, question: Question) -> Asked:
        whole = GenerateOptions(max_tokens=question.max_tokens, ignore_eos=True)
        async with places:
            greedy = await client.generate(question.prompt, **whole, temperature=0.0, speculation=False)
            coupled = await client.generate(question.prompt, **whole, **question.coupled(speculate=False))
        ids, coupled_ids = (tuple(token.id for token in made.choices[0].tokens) for made in (greedy, coupled))
        return Asked(question, Answer(ids, greedy.text, coupled_ids))

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(one(client, question) for question in asked))
