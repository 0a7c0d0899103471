"""Measure long prompts on the real model: time to first token, the target's memory, drafts kept and K by their length.

    make bench-long                                   # or: python -m benchmarks.long_prompts --help

A prompt is the end of a text of this repository's files, so that prompts of all lengths end alike and only what stands
before differs. Each is fed once into an empty cache, which gives the time to the first token and the memory; then every
arm goes on with it in turn, at the K that adapts. Needs `make real-model`; the head of `make real-head`, where it is
there, is an arm, too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from benchmarks.common import REPO, Report, parser, spread
from benchmarks.footprint import held, worker_info
from benchmarks.passes import Sample, run_pass
from benchmarks.running import running
from models.real.make import real_head, real_model, why_absent
from outrider.cli.up.endpoints import Endpoints, StartedWorker
from outrider.client import AsyncClient, Drafter, Speculation

ENDS = ("outrider/engine/kv_pool.py", "docs/speculation.md", "gateway/rounds/session.py", "docs/failure.md")
"""Files of which half ends a prompt."""
ARMS = {"none": Speculation(enabled=False)} | {
    each: Speculation(drafter=each) for each in (Drafter.NGRAM, Drafter.LOOKUP)
}
HEAD = "head"
"""The arm of a draft worker. It feeds its prompts anew: a head has nothing of what was in the prefix cache."""
PAIR_S = 120.0
"""Seconds that the head may take until it drafts, its test included. Doubled, one that never does is told of later."""


def texts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Return `count` texts of `length` tokens: other files before the first half of one of ENDS."""
    files = sorted(path for kind in ("docs/*.md", "outrider/**/*.py", "gateway/**/*.py") for path in REPO.glob(kind))
    found = []
    for name in ENDS[:count]:
        own = REPO / name
        last = own.read_text(encoding="utf-8")
        ids: list[int] = tokenizer.encode(last[: len(last) // 2], add_special_tokens=False).ids
        for path in files:
            if len(ids) >= length:
                break
            if path != own:
                ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids + ids
        found.append(ids[-length:])
    return found


class Cell:
    """What an arm made of the prompts of a length."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    @property
    def row(self) -> list[str]:
        rounds = [each for sample in self.samples for each in sample.rounds]
        drafted, kept = sum(each.num_drafted for each in rounds), sum(each.num_accepted for each in rounds)
        after_first = [(len(own.tokens), own.timings.total_s) for s in self.samples for own in s.rounds[1:]]
        num_tokens, seconds = (sum(column) for column in zip(*after_first, strict=True))
        drafting = sum(each.num_drafted > 0 for each in rounds)
        return [
            f"{drafted / drafting:.2f}" if drafting else "-",
            f"{drafting / len(rounds):.0%}",
            f"{kept / drafted:.3f}" if drafted else "-",
            f"{sum(len(each.tokens) for each in rounds) / len(rounds):.2f}",
            f"{num_tokens / seconds:.1f}",
        ]


def target_of(endpoints: Endpoints) -> StartedWorker:
    return next(worker for worker in endpoints.workers if worker.role == "target")


async def measure(
    report: Report, endpoints: Endpoints, arms: Mapping[str, Speculation], options: argparse.Namespace
) -> None:
    tokenizer = Tokenizer.from_file(str(real_model() / "tokenizer.json"))
    whole = texts(tokenizer, options.prompts, max(options.lengths))
    pid = worker_info(target_of(endpoints)).pid
    first, drafts = list[list[str]](), list[list[str]]()
    async with AsyncClient(endpoints.grpc, timeout_s=None) as client:

        async def once(prompt: Sequence[int], max_tokens: int, how: Speculation, salt: str) -> Sample:
            return await run_pass(
                client,
                [prompt],
                concurrency=1,
                temperature=0.0,
                max_tokens=max_tokens,
                speculation=how,
                cache_salt=salt,
            )

        if HEAD in arms:
            give_up, fixed = time.monotonic() + PAIR_S, replace(arms[HEAD], num_draft_tokens=2)
            while not any(each.num_drafted for each in (await once(whole[0][:64], 16, fixed, HEAD)).rounds):
                if time.monotonic() > give_up:
                    sys.exit(f"{real_head()} drafts nothing in {PAIR_S:.0f} s; outrider up --draft FOLDER says why")
                await asyncio.sleep(0.5)
        for length in options.lengths:
            cells, seconds = {name: Cell() for name in arms}, list[float]()
            for index, ids in enumerate(whole):
                prompt, salt = ids[-length:], f"{length} {index}"
                seconds.append((await once(prompt, 1, ARMS["none"], salt)).elapsed_s)
                for name in list(arms)[index % len(arms) :] + list(arms)[: index % len(arms)]:
                    own_salt = f"{salt} {name}" if name == HEAD else salt
                    cells[name].samples.append(await once(prompt, options.max_tokens, arms[name], own_salt))
            own = held(pid).own_bytes / 2**20
            rate = length / statistics.median(seconds)
            first.append([f"{length}", spread(seconds, 2), f"{rate:.0f}", f"{own:.0f}"])
            drafts += [[f"{length}, {name}", *cell.row] for name, cell in cells.items()]
            print(*first[-1], flush=True)
    columns = ("prompt tokens", "first token s", "prompt tok/s", "target's own memory MiB")
    report.table("Prompts fed into an empty cache", columns, first)
    columns = ("prompt tokens, drafter", "K of a round", "steps with drafts", "kept", "tokens a pass", "tok/s after")
    report.table("Drafts at temperature 0", columns, drafts)


def main() -> int:
    made = parser(__doc__, lengths=[256, 3000, 16000], prompts=2, max_tokens=96, dtype="float32")
    options = made.parse_args()
    if (reason := why_absent()) is not None:
        print(reason, file=sys.stderr)
        return 3
    head = real_head() if (real_head() / "config.json").is_file() else None
    arms = ARMS if head is None else ARMS | {HEAD: Speculation(drafter=Drafter.MODEL)}
    room = (sum(options.lengths) + len(ENDS) * options.max_tokens) * options.prompts * (1 if head is None else 2)
    target = {"model": str(real_model()), "dtype": options.dtype, "kv_cache_tokens": room}
    report = Report("long-prompts", "Long prompts")
    beside = "without a draft worker" if head is None else "beside a draft worker"
    report.text(
        f"Gemma 3 270M, {options.dtype}, {beside}, placed "
        f"as `outrider up` places it; {options.prompts} prompts of each length, {options.max_tokens} tokens each, one "
        "answer at a time. K is what adapts; it is the mean over steps that had drafts. In brackets the range."
    )
    with running(target, None if head is None else {"model": str(head)}) as endpoints:
        report.text(f"Attention path: {worker_info(target_of(endpoints)).attention_path}.")
        asyncio.run(measure(report, endpoints, arms, options))
    report.write(options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
