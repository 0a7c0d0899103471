"""Measure what a draft sends at a large vocabulary, how much of a round that takes, and what our processes hold.

Called by `--real`. Laws are sent at temperature above 0 under `rejection` alone; greedy and `coupled` send ids, and
show what rounds are without laws. The draft counts all that it sends, also what is never verified.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import REPO, Report
from benchmarks.footprint import Held, held, parts_below, watched
from benchmarks.passes import PHASES, Sample, phase_shares, run_pass
from benchmarks.running import running
from outrider.cli.up.endpoints import Endpoints
from outrider.client import AcceptanceRule, AsyncClient, DraftLogprobs, OutriderError, Speculation
from tests.samples import total
from tests.stack import read_metrics

TEXT = REPO / "docs" / "speculation.md"
"""Counted in by the draft that needs no model."""
CONCURRENCY = (1, 8)
CONTEXT = 1024
"""Tokens of prompt and answer, as in the comparison."""
ENCODINGS = ("ids", "topk", "full")
"""Labels of what the draft counts."""
WATCH_S = 0.25
WARM_TOKENS = 16


@dataclass(frozen=True)
class Arm:
    temperature: float
    speculation: Speculation


@dataclass(frozen=True)
class Sent:
    """A pass, and what the draft sent meanwhile."""

    sample: Sample
    num_bytes: Mapping[str, float]
    """By encoding."""
    num_dropped: float
    """Tokens that did not leave the draft: its target reads more slowly."""

    @property
    def row(self) -> list[str]:
        rounds = [each for each in self.sample.rounds if each.num_drafted]
        drafted = sum(each.num_drafted for each in rounds)
        accepted = sum(each.num_accepted for each in rounds)
        if not drafted:
            return [f"{self.sample.tokens_per_s:.1f}", "nothing drafted"]
        kilobytes = sum(self.num_bytes.values()) / 1e3
        seconds = sum(each.timings.total_s for each in rounds)
        shares = phase_shares(rounds)
        return [
            f"{self.sample.tokens_per_s:.1f}",
            f"{100 * accepted / drafted:.0f} %",
            ", ".join(name for name in ENCODINGS if self.num_bytes[name]),
            f"{kilobytes / drafted:.2f}",
            f"{kilobytes / self.sample.num_tokens:.2f}",
            f"{1e3 * seconds / len(rounds):.0f}",
            *(f"{100 * shares[name]:.0f} %" for name in PHASES),
            f"{self.num_dropped:.0f}",
        ]


COLUMNS = (
    "tok/s",
    "accepted",
    "sent as",
    "kB a drafted token",
    "kB a committed token",
    "ms a round",
    "held for drafts",
    "verify",
    "overhead",
    "dropped",
)


def arms(num_draft_tokens: int) -> dict[str, Arm]:
    def drafted(**options: Any) -> Speculation:
        return Speculation(num_draft_tokens=num_draft_tokens, **options)

    laws = {
        f"T = 1, {each}": Arm(1.0, drafted(acceptance=AcceptanceRule.REJECTION, draft_logprobs=each))
        for each in (DraftLogprobs.FULL, DraftLogprobs.TOPK, DraftLogprobs.AUTO)
    }
    return {
        "T = 0": Arm(0.0, drafted()),
        "T = 1, coupled": Arm(1.0, drafted(acceptance=AcceptanceRule.COUPLED)),
        **laws,
    }


def drafts(target: Path, head: Path) -> dict[str, dict[str, Any]]:
    """Return settings of drafts by name: the head where there is one, else a table; and the target as its own draft,
    for its laws alone are over the whole vocabulary.
    """
    first: dict[str, dict[str, Any]] = {"EAGLE-3 head": {"model": str(head)}}
    if not (head / "config.json").exists():
        first = {
            f"bigrams of {TEXT.relative_to(REPO)}": {
                "model": str(target),
                "drafter": "bigram",
                "drafter_text": str(TEXT),
            }
        }
    return first | {"the model itself": {"model": str(target)}}


def add_wire(
    report: Report,
    target: Path,
    head: Path,
    prompts: Sequence[Sequence[int]],
    cores: Sequence[int],
    options: argparse.Namespace,
) -> None:
    """Measure every draft with every arm, one pass each, and add the tables."""
    dtype, most = options.dtype[0], max(CONCURRENCY)
    common = {
        "dtype": dtype,
        "cpu_cores": ",".join(map(str, cores)),
        "prefix_caching": False,
        "max_slots": most,
        "context_limit": CONTEXT,
        "metrics_port": 0,
    }
    rows, memory = list[list[str]](), list[list[str]]()
    for name, settings in drafts(target, head).items():
        with running({"model": str(target), **common}, {**common, **settings}, {"max_running": most}) as endpoints:
            pids = parts_below(endpoints.workers)
            before = {part: held(pid) for part, pid in pids.items()}
            with watched(pids, WATCH_S) as seen:
                found = asyncio.run(_passes(endpoints, prompts, options))
        for (concurrency, arm), sent in found.items():
            rows.append([f"{name}, {concurrency} at once, {arm}", *([sent] if isinstance(sent, str) else sent.row)])
        memory += [[f"{name}: {part}", *_memory(before[part], seen[part])] for part in pids]
    report.table(f"On the wire: {dtype}, K = {options.num_draft_tokens}", ("draft, load, arm", *COLUMNS), rows)
    report.text(
        "Bytes are those of proposals that the draft sent, of which some are never verified; 1 kB is 1,000 bytes. "
        "Shares are of the time of rounds with drafts: held for drafts is what the target waited, for drafting and for "
        "the wire together, verify is queue, forward and acceptance in the target, overhead the gateway and its "
        "streams. T = 0 and coupled send ids alone: what full or topk take beyond coupled is what their laws cost. "
        "auto is what requests get that say nothing. One pass each."
    )
    columns = ("draft: process", "resident at the start", "its own", "most under load", "its own")
    report.table(f"Memory, MiB: {dtype}, a context of {CONTEXT}, {most} slots", columns, memory)
    report.text("Resident memory, and what of it belongs to no file: heaps, weights that are not mapped, the KV cache.")
    report.data |= {"wire": rows, "memory": memory}


async def _passes(
    endpoints: Endpoints, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> dict[tuple[int, str], Sent | str]:
    """Return by load and arm what came, or why nothing did."""
    found: dict[tuple[int, str], Sent | str] = {}
    async with AsyncClient(endpoints.grpc, timeout_s=None) as client:
        warm_up = next(iter(arms(options.num_draft_tokens).values()))
        await _pass(client, endpoints, prompts[:1], warm_up, 1, WARM_TOKENS)
        for concurrency in CONCURRENCY:
            share = prompts[: max(options.prompts, concurrency)]
            for name, arm in arms(options.num_draft_tokens).items():
                try:
                    came: Sent | str = await _pass(client, endpoints, share, arm, concurrency, options.max_tokens)
                except OutriderError as error:
                    came = f"{type(error).__name__}: {error.message}"
                found[concurrency, name] = came
                print(f"{concurrency} at once, {name}:", *([came] if isinstance(came, str) else came.row), flush=True)
    return found


async def _pass(
    client: AsyncClient,
    endpoints: Endpoints,
    prompts: Sequence[Sequence[int]],
    arm: Arm,
    concurrency: int,
    max_tokens: int,
) -> Sent:
    before = _counts(endpoints)
    sample = await run_pass(
        client,
        prompts,
        concurrency=concurrency,
        temperature=arm.temperature,
        max_tokens=max_tokens,
        speculation=arm.speculation,
        seed=1,
    )
    grown = {name: value - before[name] for name, value in _counts(endpoints).items()}
    return Sent(sample, {name: grown[name] for name in ENCODINGS}, grown["dropped"])


def _counts(endpoints: Endpoints) -> dict[str, float]:
    draft = read_metrics(f"http://{endpoints.first('draft').metrics}/metrics")
    name = "outrider_worker_delivered_bytes_total"
    return {each: total(draft, name, encoding=each) for each in ENCODINGS} | {
        "dropped": total(draft, "outrider_worker_dropped_draft_tokens_total")
    }


def _memory(before: Held, seen: Sequence[Held]) -> list[str]:
    """Return MiB at the start and at most: resident, and of that the process's own."""
    most = (max(each.rss_bytes for each in seen), max(each.own_bytes for each in seen))
    return [f"{value / 2**20:.0f}" for value in (before.rss_bytes, before.own_bytes, *most)]
