"""Resident memory of workers as they start, and after answers: the demo pair's, and one of a large context.

    make bench-resident

The second is a Llama of 270 million random weights with a context of 32,768 tokens, in float32, asked for nothing but
what its start asks. The exit code is 1 where the two demo workers together hold 1.3 GiB or more, or the other 3 GB.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, WORK, dev_prompts
from benchmarks.footprint import parts_below
from benchmarks.passes import run_pass
from benchmarks.running import running
from outrider.client import AsyncClient

PAIR_BYTES = 1.3 * (1 << 30)
LARGE_BYTES = 3e9
CONTEXT = 32768


def random_270m() -> Path:
    """Return the folder of the model, made when it is missing."""
    folder = WORK / f"random-270M-{CONTEXT}"
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(DEMO_TARGET).save_pretrained(folder)
    return folder


def resident_bytes(pids: Iterable[int]) -> int:
    """Return VmRSS of these processes together."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return total


async def answered(address: str) -> None:
    async with AsyncClient(address) as client:
        await run_pass(client, dev_prompts(8), concurrency=8, temperature=0.0, max_tokens=64, speculation=True)


def main() -> int:
    with running({"model": DEMO_TARGET}, {"model": DEMO_DRAFT}) as endpoints:
        pids = [pid for name, pid in parts_below().items() if name.endswith("_service")]
        for worker in endpoints.workers:
            print(f"{worker.name}: {worker.memory}")
        pair = resident_bytes(pids)
        print(f"the demo pair's workers: {pair / (1 << 30):.2f} GiB resident at the start", flush=True)
        asyncio.run(answered(endpoints.grpc))
        pair = resident_bytes(pids)
        print(f"the demo pair's workers: {pair / (1 << 30):.2f} GiB resident after 8 answers, of 1.30", flush=True)
    with running({"model": str(random_270m()), "dtype": "float32"}, None) as endpoints:
        large = resident_bytes(pid for name, pid in parts_below().items() if name.endswith("_service"))
        print(f"{endpoints.workers[0].name}: {endpoints.workers[0].memory}")
        print(f"270M random weights, a context of {CONTEXT}: {large / 1e9:.2f} GB resident, of 3.00", flush=True)
    return int(pair >= PAIR_BYTES or large >= LARGE_BYTES)


if __name__ == "__main__":
    sys.exit(main())
