"""What the prefix cache saves of the time to the first token, and what a KV cache that is too small costs.

    make bench-memory                                 # or: python -m benchmarks.memory --help

The first part asks a target twice, for prompts that begin alike. The second sends many requests at once to a system
with memory for a few and to one with memory for all, in turns, and compares the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from contextlib import AbstractContextManager

from benchmarks.common import DEMO_DRAFT, Report, parser, random_94m, spread, widened
from benchmarks.passes import Sample, run_pass
from benchmarks.running import running
from outrider.cli.up.supervisor import Endpoints
from outrider.client import AsyncClient, Speculation
from tests.stack import read_metrics

CONTEXT = 4096
VOCAB_SIZE = 4096
NUM_SHARED, NUM_OWN = 1500, 20
"""Tokens that two prompts begin with, and tokens that each has after them."""
PROMPT_TOKENS, ANSWER_TOKENS = 60, 40
"""Tokens of a request to a pool that is too small."""
DRAFTED = Speculation(num_draft_tokens=5)
"""Drafts whether that pays or not, so that every request holds a slot at the draft."""
ROLES = ("target", "draft")


def some_ids(count: int, seed: str) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(5, VOCAB_SIZE) for _ in range(count)]


def pair_of_prompts(name: str) -> list[list[int]]:
    """Return two prompts that begin alike, and that nobody has asked before."""
    shared = some_ids(NUM_SHARED, name)
    return [shared + some_ids(NUM_OWN, f"{name} {index}") for index in range(2)]


async def first_tokens(address: str, repetitions: int) -> list[list[tuple[float, int]]]:
    """Return (seconds to the first token at the client, prompt tokens found in the cache) of each request."""

    async def ask(client: AsyncClient, prompt: list[int]) -> tuple[float, int]:
        sent = time.perf_counter()
        answer = await client.generate(
            prompt_ids=prompt, max_tokens=1, temperature=0.0, speculation=False, ignore_eos=True
        )
        return time.perf_counter() - sent, answer.usage.num_cached_prompt_tokens

    async with AsyncClient(address) as client:
        await ask(client, some_ids(100, "warms up"))
        return [[await ask(client, prompt) for prompt in pair_of_prompts(str(number))] for number in range(repetitions)]


def add_first_tokens(report: Report, repetitions: int) -> None:
    target = {"model": str(random_94m(CONTEXT)), "kv_cache_tokens": 4 * CONTEXT, "dtype": "float32"}
    with running(target, None) as endpoints:
        found = asyncio.run(first_tokens(endpoints.grpc, repetitions))
    rows = list[list[str]]()
    for name, requests in zip(("first", "second"), zip(*found, strict=True), strict=True):
        cached = statistics.median_low([number for _, number in requests])
        rows.append([name, spread([1e3 * seconds for seconds, _ in requests]), str(cached)])
    report.table(
        f"Time to the first token: prompts of {NUM_SHARED + NUM_OWN} tokens, of which {NUM_SHARED} are shared",
        ("request", "ms", "tokens found in the cache"),
        rows,
    )
    ratios = [second / first for (first, _), (second, _) in found]
    report.text(
        "A random-weight Llama of 94M parameters, decoding plainly; the time is a client's. "
        f"{repetitions} pairs, every one with a prefix of its own. Second over first: {spread(ratios, 3)}."
    )
    report.data["first_tokens_s"] = found


def preemptions(endpoints: Endpoints) -> dict[str, float]:
    name = 'outrider_worker_preemptions_total{worker="%s"}'
    metrics = {role: endpoints.first(role).metrics for role in ROLES}
    return {role: read_metrics(f"http://{metrics[role]}/metrics")[name % role] for role in ROLES}


async def ask_all(address: str, repetition: int, count: int) -> Sample:
    """Send all requests at once."""
    prompts = [some_ids(PROMPT_TOKENS + index % 7, f"{repetition} {index}") for index in range(count)]
    async with AsyncClient(address) as client:
        return await run_pass(
            client, prompts, concurrency=count, temperature=0.0, max_tokens=ANSWER_TOKENS, speculation=DRAFTED
        )


def pair(options: argparse.Namespace, kv_cache_tokens: int) -> AbstractContextManager[Endpoints]:
    common = {"kv_cache_tokens": kv_cache_tokens, "max_slots": options.requests, "dtype": "float32", "metrics_port": 0}
    target, draft = ({"model": str(model), **common} for model in (widened(options.size), DEMO_DRAFT))
    return running(target, draft, {"max_running": options.requests})


def add_small_pool(report: Report, options: argparse.Namespace) -> None:
    pools = {"large": 2 * options.requests * (PROMPT_TOKENS + ANSWER_TOKENS), "small": options.small_pool}
    samples: dict[str, list[Sample]] = {name: [] for name in pools}
    with pair(options, pools["large"]) as large, pair(options, pools["small"]) as small:
        systems = {"large": large, "small": small}
        for repetition in range(options.repetitions):
            for name in list(systems) if repetition % 2 else reversed(list(systems)):
                samples[name].append(asyncio.run(ask_all(systems[name].grpc, repetition, options.requests)))
                print(f"{name} pool: {samples[name][-1].tokens_per_s:.1f} tokens/s", flush=True)
        preempted = {name: preemptions(endpoints) for name, endpoints in systems.items()}
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(samples["small"], samples["large"], strict=True)]
    same = [
        mine == theirs
        for a, b in zip(samples["small"], samples["large"], strict=True)
        for mine, theirs in zip(a.outputs, b.outputs, strict=True)
    ]
    rows = [
        [
            f"{name}, {pools[name]} tokens on each worker",
            spread([sample.tokens_per_s for sample in samples[name]]),
            *(f"{preempted[name][role]:.0f}" for role in ROLES),
        ]
        for name in pools
    ]
    report.table(
        f"{options.requests} requests at once, {options.repetitions} times: KV cache for all of them, and for about "
        f"{options.small_pool / (PROMPT_TOKENS + ANSWER_TOKENS):.0f}",
        ("KV cache", "tok/s", "preemptions, target", "draft"),
        rows,
    )
    report.text(
        f"The demo pair, its target WIDENED to {options.size}; prompts of {PROMPT_TOKENS} to {PROMPT_TOKENS + 6} "
        f"tokens, {ANSWER_TOKENS} tokens an answer, greedy, with the draft. {sum(same)} of {len(same)} answers have "
        f"the same tokens in both. Small over large, within a repetition: {spread(ratios, 2)}."
    )
    report.data["pools"] = {
        name: {"tokens_per_s": [sample.tokens_per_s for sample in samples[name]], "preemptions": preempted[name]}
        for name in pools
    } | {"same": sum(same), "answers": len(same)}


def main() -> None:
    options = parser(__doc__, size="94M", pairs=5, requests=64, small_pool=432, repetitions=3).parse_args()
    report = Report("memory", "Prefix cache, and more requests than memory")
    add_first_tokens(report, options.pairs)
    add_small_pool(report, options)
    report.write(options.results)


if __name__ == "__main__":
    main()
