"""What is asked, and the right answers: those of the same system before anything happens to it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.client import AsyncClient

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


@dataclass(frozen=True)
class Answer:
    """Greedy, by plain decoding."""

    ids: tuple[int, ...]
    text: str


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
        )
        for index in range(count)
    ]


async def answered(address: str, asked: Sequence[Question]) -> list[Asked]:
    """Over gRPC, without drafts."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(client: AsyncClient, question: Question) -> Asked:
        async with places:
            made = await client.generate(
                question.prompt,
                max_tokens=question.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                speculation=False,
            )
        choice = made.choices[0]
        return Asked(question, Answer(tuple(token.id for token in choice.tokens), choice.text))

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(one(client, question) for question in asked))
