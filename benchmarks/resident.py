"""Resident memory of workers as they start, and after answers: the demo pair's, and one of a large context.

    make bench-resident

The second is a Llama of 270 million random weights with a context of 32,768 tokens, in float32, asked for nothing but
what its start asks. The exit code is 1 where the two demo workers together hold 1.3 GiB or more, or the other 3 GB.
"""

from __future__ import annotations

import asyncio
import sys

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, dev_prompts, random_llama
from benchmarks.footprint import held, parts_below
from benchmarks.passes import run_pass
from benchmarks.running import running
from outrider.client import AsyncClient

PAIR_BYTES = 1.3 * (1 << 30)
LARGE_BYTES = 3e9
CONTEXT = 32768


def resident_bytes() -> int:
    """Return what the workers that run hold together."""
    return sum(held(pid).rss_bytes for name, pid in parts_below().items() if name.endswith("_service"))


async def answered(address: str) -> None:
    async with AsyncClient(address) as client:
        await run_pass(client, dev_prompts(8), concurrency=8, temperature=0.0, max_tokens=64, speculation=True)


def main() -> int:
    with running({"model": DEMO_TARGET}, {"model": DEMO_DRAFT}) as endpoints:
        for worker in endpoints.workers:
            print(f"{worker.name}: {worker.memory}")
        pair = resident_bytes()
        print(f"the demo pair's workers: {pair / (1 << 30):.2f} GiB resident at the start", flush=True)
        asyncio.run(answered(endpoints.grpc))
        pair = resident_bytes()
        print(f"the demo pair's workers: {pair / (1 << 30):.2f} GiB resident after 8 answers, of 1.30", flush=True)
    model = random_llama("270M", CONTEXT, vocab_size=32000, intermediate_size=4096, num_hidden_layers=16)
    with running({"model": str(model), "dtype": "float32"}, None) as endpoints:
        large = resident_bytes()
        print(f"{endpoints.workers[0].name}: {endpoints.workers[0].memory}")
        print(f"270M random weights, a context of {CONTEXT}: {large / 1e9:.2f} GB resident, of 3.00", flush=True)
    return int(pair >= PAIR_BYTES or large >= LARGE_BYTES)


if __name__ == "__main__":
    sys.exit(main())
