"""Tokens per second by concurrency with speculation on, off and automatic; memory per request; the longest context.

    make bench-throughput                             # or: python -m benchmarks.throughput --help

Measures one running system as `outrider up` places it, the widened demo target; arms take turns within each repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

from tokenizers import Tokenizer

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, Report, dev_prompts, parser, random_94m, spread, widened
from benchmarks.footprint import held, worker_info
from benchmarks.passes import Sample, phase_shares, run_pass, take_turns
from benchmarks.running import running
from outrider.cli.up.supervisor import Endpoints
from outrider.client import AsyncClient, OutriderError, Speculation

PROMPT_TOKENS = 128
ARMS: dict[str, Speculation | bool] = {"off": False, "on": Speculation(num_draft_tokens=5), "automatic": Speculation()}


async def rates(
    address: str, options: argparse.Namespace, prompts: list[list[int]]
) -> dict[int, dict[str, list[Sample]]]:
    """Return samples by concurrency and arm."""
    found: dict[int, dict[str, list[Sample]]] = {}
    async with AsyncClient(address) as client:
        await run_pass(client, prompts[:2], concurrency=2, temperature=0.0, max_tokens=16, speculation=True)
        for concurrency in options.concurrency:
            found[concurrency] = {}
            await take_turns(
                client,
                prompts[: max(concurrency, options.prompts)],
                ARMS,
                found[concurrency],
                range(options.repetitions),
                concurrency=concurrency,
                temperature=options.temperature,
                max_tokens=options.max_tokens,
            )
    return found


def add_rates(report: Report, found: dict[int, dict[str, list[Sample]]]) -> None:
    rows = []
    for concurrency, arms in found.items():
        by_arm = {name: [sample.tokens_per_s for sample in samples] for name, samples in arms.items()}
        ratios = {
            name: [rate / off for rate, off in zip(by_arm[name], by_arm["off"], strict=True)]
            for name in ("on", "automatic")
        }
        drafted = [item for sample in arms["on"] for item in sample.rounds if item.num_drafted]
        accepted = sum(item.num_accepted for item in drafted) / max(1, sum(item.num_drafted for item in drafted))
        shares = phase_shares(drafted) if drafted else {}
        row = [str(concurrency), *(spread(by_arm[name]) for name in ARMS)]
        row += [f"{statistics.median(ratios[name]):.2f}" for name in ("on", "automatic")]
        rows.append([*row, f"{100 * accepted:.0f} %", *(f"{100 * share:.0f} %" for share in shares.values())])
    columns = ["concurrency", *(f"{name}, tok/s" for name in ARMS), "on / off", "automatic / off", "accepted"]
    report.table("Speculation by concurrency", [*columns, "draft", "wire", "verify", "overhead"], rows)
    report.text(
        "automatic: what a request that says nothing of speculation gets. The last four: shares of a speculative "
        "round's time with speculation on."
    )
    report.data["rates"] = {
        str(concurrency): {name: [sample.tokens_per_s for sample in samples] for name, samples in arms.items()}
        for concurrency, arms in found.items()
    }


def add_memory(report: Report, endpoints: Endpoints, mean_tokens: float, before: dict[str, int]) -> None:
    """Add KV by the bytes a token that the worker reports, and resident memory before the first request and now."""
    rows = []
    for role in ("target", "draft"):
        info = worker_info(endpoints.first(role))
        tokens = info.num_kv_blocks * info.kv_block_size
        rows.append(
            [
                role,
                info.attention_path,
                f"{info.kv_bytes_per_token / 1024:.1f}",
                f"{info.kv_bytes_per_token * mean_tokens / 2**20:.2f}",
                f"{tokens} ({tokens * info.kv_bytes_per_token / 2**20:.0f} MiB)",
                f"{before[role] / 2**20:.0f}",
                f"{held(info.pid).rss_bytes / 2**20:.0f}",
            ]
        )
    columns = ("worker", "path", "KV KiB / token", f"KV MiB / request of {mean_tokens:.0f} tokens", "KV tokens in all")
    report.table("Memory", (*columns, "resident MiB before", "after"), rows)


async def ask(address: str, num_prompt: int, num_answer: int) -> str:
    """Return the outcome of one request of that length, in words."""
    prompt = [1 + index % 4000 for index in range(num_prompt)]
    async with AsyncClient(address, retries=0) as client:
        try:
            sample = await run_pass(
                client, [prompt], concurrency=1, temperature=0.0, max_tokens=num_answer, speculation=False
            )
        except OutriderError as error:
            return f"refused: {error.message}"
    return f"{sample.num_tokens} tokens in {sample.elapsed_s:.1f} s"


def add_longest(report: Report, options: argparse.Namespace) -> None:
    """Try a request that fills the KV cache to the last token, and one that is a token too long."""
    model, num_answer = random_94m(4 * options.longest), 16
    target = {"model": str(model), "kv_cache_tokens": options.longest, "dtype": "float32"}
    with running(target, None, {"max_running": 4}) as endpoints:
        info = worker_info(endpoints.first("target"))
        pool = info.num_kv_blocks * info.kv_block_size
        rows = []
        for total in (pool // 4, pool, pool + 1):
            came = asyncio.run(ask(endpoints.grpc, total - num_answer, num_answer))
            rows.append([f"{total - num_answer} + {num_answer}", came])
    report.table(
        f"Longest context: random weights, 94M, context of {info.context_limit}, KV cache of {pool} tokens "
        f"({pool * info.kv_bytes_per_token / 2**20:.0f} MiB)",
        ("prompt + answer", "came to"),
        rows,
    )
    report.text(
        "What limits a request is the smaller of the model's own context and the KV cache; by default that is as many "
        "tokens as fit into half of the free memory."
    )


def main() -> None:
    made = parser(
        __doc__,
        size="111M",
        dtype="float32",
        concurrency=[1, 4, 16, 64],
        temperature=0.0,
        prompts=4,
        max_tokens=64,
        repetitions=2,
    )
    made.add_argument("--longest", type=int, default=8192, help="tokens of the KV cache that one request fills; 0: not")
    options = made.parse_args()
    report = Report("throughput", "Throughput and memory")
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    count = max([options.prompts, *options.concurrency])
    prompts = [tokenizer.encode(text).ids[-PROMPT_TOKENS:] for text in dev_prompts(count)]
    report.text(
        f"The demo pair, its target WIDENED to {options.size}, {options.dtype}, placed as `outrider up` places it; "
        f"prompts of {PROMPT_TOKENS} tokens or less, {options.max_tokens} tokens an answer, "
        f"T = {options.temperature:g}, prefix caches off, since every pass has the same prompts."
    )
    common = {"dtype": options.dtype, "max_slots": count, "prefix_caching": False}
    target, draft = {"model": str(widened(options.size)), **common}, {"model": str(DEMO_DRAFT), **common}
    with running(target, draft, {"max_running": count}) as endpoints:
        pids = {role: worker_info(endpoints.first(role)).pid for role in ("target", "draft")}
        before = {role: held(pid).rss_bytes for role, pid in pids.items()}
        add_rates(report, asyncio.run(rates(endpoints.grpc, options, prompts)))
        mean_tokens = statistics.mean(len(prompt) for prompt in prompts) + options.max_tokens
        add_memory(report, endpoints, mean_tokens, before)
    if options.longest:
        add_longest(report, options)
    report.write(options.results)


if __name__ == "__main__":
    main()
