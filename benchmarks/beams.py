"""Beam search with drafts and without: passes of the target, seconds, and whether the answers are transformers' own.

    make bench-beams                                  # or: python -m benchmarks.beams --help

On the demo pair, and on the translation pair with each of its drafts; one search at a time. Each prompt is searched
with every K in turn before the next one, in another order each time, so that a drift of the machine hits all alike, and
under a cache salt of its own. Passes depend on the pair, the text and K; seconds on the machine as well. Fails where an
answer is not that of transformers' `generate`, in a process of its own, but for answers whose scores are closer than
rounding tells apart.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, TRANSLATION, Report, dev_prompts, parser, translation_drafts
from benchmarks.passes import Ratio
from benchmarks.running import running
from outrider.cli.demo.demo_runs import read_prompts
from outrider.client import AsyncClient, Choice, Speculation

if TYPE_CHECKING:  # torch is for the process that judges
    from outrider.lab.models.reference_generate import Reference

NONE = "none"
ARMS = {NONE: Speculation(enabled=False), "K = 5": Speculation(num_draft_tokens=5), "K auto": Speculation()}
NEAR_TIE = 1e-4
"""Two answers of scores that are closer, in nats, may stand the other way around; that of tests/e2e/test_beams.py."""
SAME, TIED, OTHER = "as transformers'", "near-ties", "others"

Expected = Sequence[Sequence[tuple[list[int], float]]]
"""By prompt, the ids and scores of transformers' answers."""


@dataclass(frozen=True)
class Pair:
    name: str
    target: Path
    draft: Path
    prompts: list[str]


@dataclass(frozen=True)
class Search:
    choices: tuple[Choice, ...]
    seconds: float

    @property
    def num_passes(self) -> int:
        usage = self.choices[0].usage  # that of the whole search
        return usage.num_rounds + usage.num_plain_steps


Measured = Mapping[int, Mapping[str, Sequence[Search]]]
"""Searches by width and arm, in the order of the prompts."""


def pairs_of(num_prompts: int) -> list[Pair]:
    prompts = read_prompts(TRANSLATION / "prompts.jsonl")[:num_prompts]
    return [
        Pair("Demo pair", DEMO_TARGET, DEMO_DRAFT, dev_prompts(num_prompts)),
        *(Pair(f"Translation, {each.name}", TRANSLATION / "target", each, prompts) for each in translation_drafts()),
    ]


async def searched(address: str, prompts: Sequence[str], width: int, max_tokens: int) -> dict[str, list[Search]]:
    """Return the searches by arm, in the order of the prompts."""
    found: dict[str, list[Search]] = {name: [] for name in ARMS}
    async with AsyncClient(address) as client:

        async def search(prompt: str, name: str, salt: str) -> Search:
            began_s = time.perf_counter()
            made = await client.generate(
                prompt, use_beam_search=True, n=width, max_tokens=max_tokens, cache_salt=salt, speculation=ARMS[name]
            )
            return Search(made.choices, time.perf_counter() - began_s)

        for name in ARMS:
            await search(prompts[0], name, "warm")
        for index, prompt in enumerate(prompts):
            first = index % len(ARMS)
            for name in (*list(ARMS)[first:], *list(ARMS)[:first]):
                found[name].append(await search(prompt, name, f"{index} {name} {width}"))
    return found


@functools.cache
def reference(model: Path) -> Reference:
    import torch
    from transformers.utils import logging as transformers_logging

    from outrider.lab.models.reference_generate import Reference

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # a small model gains nothing by more
    return Reference(str(model))


def by_transformers(model: Path, prompts: Sequence[str], width: int, max_tokens: int) -> Expected:
    """In a process of its own."""
    return [reference(model).search(prompt, width, max_tokens) for prompt in prompts]


def judged(searches: Sequence[Search], expected: Expected) -> Counter[str]:
    """Count the answers that are as expected, those that are near-ties of those, and others."""
    counts = Counter[str]()
    for search, answers in zip(searches, expected, strict=True):
        for choice, (ids, score) in zip(search.choices, answers, strict=True):
            assert choice.score is not None, "an answer of a search has a score"
            is_tied = abs(choice.score - score) < NEAR_TIE
            counts[SAME if [token.id for token in choice.tokens] == ids else TIED if is_tied else OTHER] += 1
    return counts


def measured(pair: Pair, widths: Sequence[int], max_tokens: int) -> Measured:
    settings = [{"model": str(folder), "dtype": "float32"} for folder in (pair.target, pair.draft)]
    with running(*settings) as endpoints:
        return {width: asyncio.run(searched(endpoints.grpc, pair.prompts, width, max_tokens)) for width in widths}


def compare(pair: Pair, found: Measured, args: argparse.Namespace, report: Report, pool: Executor) -> list[str]:
    """Add a pair's table. Return what is not as it should be."""
    rows, wrong, data = list[tuple[str, ...]](), list[str](), dict[str, object]()
    for width, arms in found.items():
        expected = pool.submit(by_transformers, pair.target, pair.prompts, width, args.tokens).result()
        for name, searches in arms.items():
            counts, plain = judged(searches, expected), arms[NONE]
            if counts[OTHER]:
                wrong.append(f"{pair.name}, {width} beams, drafts {name}: {counts[OTHER]} answers are not the target's")
            num_passes, num_plain = (sum(each.num_passes for each in some) for some in (searches, plain))
            seconds = statistics.fmean(each.seconds for each in searches)
            pairs = zip(plain, searches, strict=True)
            speed = "" if name == NONE else str(Ratio.of([[one.seconds / other.seconds] for one, other in pairs]))
            saved = "" if name == NONE else f"{100 * (1 - num_passes / num_plain):.0f} %"
            cells = (f"{num_passes / len(searches):.1f}", saved, f"{seconds:.3f}", speed)
            rows.append((f"{width}, {name}", *cells, *(str(counts[kind]) for kind in (SAME, TIED, OTHER))))
            data[rows[-1][0]] = {
                "passes": [each.num_passes for each in searches],
                "seconds": [each.seconds for each in searches],
            }
    columns = ("beams, drafts", "passes a search", "saved", "seconds a search", "speed over none", SAME, TIED, OTHER)
    report.table(f"{pair.name}: {len(pair.prompts)} prompts, at most {args.tokens} tokens", columns, rows)
    report.data[pair.name] = data
    return wrong


def main() -> int:
    args = parser(__doc__, widths=[2, 4, 8], prompts=24, tokens=64).parse_args()
    report, wrong = Report("beams", "Beam search with drafts and without"), list[str]()
    found = [(pair, measured(pair, args.widths, args.tokens)) for pair in pairs_of(args.prompts)]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for pair, searches in found:
            wrong += compare(pair, searches, args, report, pool)
    report.verdict(wrong, "All answers are those of transformers' `generate`, near-ties apart.")
    report.write(args.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
