"""What drafts without a model gain and cost, on text that repeats itself and on text that does not.

    make bench-drafters                               # or: python -m benchmarks.drafters --help

The target is the demo target widened, each worker on its own core. Each prompt is answered by every arm in turn before
the next one, in another order each time, so that a drift of the machine hits all alike; K is the server's own choice. A
ratio is that of two answers to one prompt in one repetition. Each request has a cache salt of its own: no prefix is
found again, and `lookup` sees nothing of the answer that another arm gave.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, REPO, RESULTS, Report, widened
from benchmarks.passes import Sample, in_turn
from benchmarks.running import running
from outrider.client import Drafter, Speculation

PLAIN = "plain"
WITHOUT_MODEL = ("ngram", "lookup")
ARMS: Mapping[str, Speculation] = {
    PLAIN: Speculation(enabled=False),
    **{name: Speculation(drafter=Drafter(name)) for name in (*WITHOUT_MODEL, "model", "ngram+model")},
}
REPETITIVE, DEV = "repetitive", "held-out"
SETS = {
    REPETITIVE: REPO / "benchmarks" / "prompts" / "repetitive.jsonl",
    DEV: REPO / "tests" / "data" / "prompts.jsonl",
}
LEAST_RATIO = 0.98
"""Least median speed of a drafter without a model, as a share of plain decoding's, where nothing repeats."""
PROMPT_TOKENS = 512
NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Prompt:
    kind: str
    """code, json, question or prose."""
    text: str


def repetitive_prompts() -> list[str]:
    return [prompt.text for prompt in read_prompts(REPETITIVE)]


def read_prompts(name: str) -> list[Prompt]:
    """Return all prompts of a set, in the order of its file."""
    lines = [json.loads(line) for line in SETS[name].read_text(encoding="utf-8").splitlines()]
    return [Prompt(str(line["category"]), str(line["prompt"])) for line in lines]


def of_all_kinds(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts, or all: the first of each kind in turn, while it has any left."""
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    by_kind = [[prompt for prompt in prompts if prompt.kind == kind] for kind in kinds]
    rounds = itertools.zip_longest(*by_kind)
    return [prompt for each in rounds for prompt in each if prompt is not None][:count]


def numbers_by_kind(prompts: Sequence[Prompt]) -> dict[str, int]:
    return dict(Counter(prompt.kind for prompt in prompts))


@dataclass(frozen=True)
class Ratio:
    """Median over answers, and the interval of 95 % from a bootstrap that draws whole prompts."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, by_prompt: Sequence[Sequence[float]]) -> Ratio:
        """Return the ratio of the values by prompt, at least one value each."""
        rng = np.random.default_rng(0)
        picks = rng.integers(len(by_prompt), size=(NUM_RESAMPLES, len(by_prompt)))
        medians = [float(np.median(np.concatenate([by_prompt[i] for i in row]))) for row in picks]
        low, high = np.quantile(medians, (0.025, 0.975))
        return cls(float(np.median(np.concatenate([*by_prompt]))), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


@dataclass(frozen=True)
class Cell:
    """Answers of one arm to one set of prompts at one temperature."""

    samples: list[list[Sample]]
    """Samples by prompt, one a repetition."""

    @property
    def tokens_per_pass(self) -> float:
        every = [sample for each in self.samples for sample in each]
        return sum(sample.num_tokens for sample in every) / sum(len(sample.rounds) for sample in every)

    @property
    def share_kept(self) -> float | None:
        """Share of the drafts that were kept; None without any."""
        rounds = [item for each in self.samples for sample in each for item in sample.rounds]
        drafted = sum(item.num_drafted for item in rounds)
        return sum(item.num_accepted for item in rounds) / drafted if drafted else None

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(sample.tokens_per_s for each in self.samples for sample in each)

    def only(self, indices: Sequence[int]) -> Cell:
        """Return the cell of these prompts alone."""
        return Cell([self.samples[index] for index in indices])

    def over(self, plain: Cell) -> Ratio:
        """Return the ratio of the speeds, answer by answer."""
        pairs = zip(self.samples, plain.samples, strict=True)
        return Ratio.of([[a.tokens_per_s / b.tokens_per_s for a, b in zip(*pair, strict=True)] for pair in pairs])


def add_kinds(
    report: Report, name: str, temperature: float, prompts: Sequence[Prompt], cells: Mapping[str, Cell]
) -> None:
    """Add the same answers, a kind of prompt at a time."""
    rows, found = [], dict[str, dict[str, Any]]()
    for kind, number in numbers_by_kind(prompts).items():
        indices = [index for index, prompt in enumerate(prompts) if prompt.kind == kind]
        of_kind = {arm: cell.only(indices) for arm, cell in cells.items()}
        found[kind] = {"num_prompts": number, "tokens_per_pass": {}, "over_plain": {}}
        for arm, cell in of_kind.items():
            if arm == PLAIN:
                continue
            ratio = cell.over(of_kind[PLAIN])
            rows.append([f"{kind} ({number})", arm, f"{cell.tokens_per_pass:.2f}", str(ratio)])
            found[kind]["tokens_per_pass"][arm] = cell.tokens_per_pass
            found[kind]["over_plain"][arm] = asdict(ratio)
    columns = ("prompts", "drafter", "tokens a target pass", "speed over plain")
    report.table(f"{name.capitalize()} prompts by kind, T = {temperature:g}", columns, rows)
    report.data[f"{name} by kind, T = {temperature:g}"] = found


def add_cells(report: Report, name: str, temperature: float, cells: Mapping[str, Cell]) -> list[str]:
    """Add the table and return the violations."""
    rows, wrong = [], []
    for arm, cell in cells.items():
        kept = "" if cell.share_kept is None else f"{100 * cell.share_kept:.0f} %"
        row = [arm, f"{cell.tokens_per_pass:.2f}", kept, f"{cell.tokens_per_s:.1f}"]
        ratio = None if arm == PLAIN else cell.over(cells[PLAIN])
        rows.append([*row, "" if ratio is None else str(ratio)])
        if ratio is not None and name == DEV and arm in WITHOUT_MODEL and ratio.median < LEAST_RATIO:
            wrong.append(
                f"{arm} on {name} prompts at T = {temperature:g}: {ratio} of plain, at least {LEAST_RATIO:g} wanted"
            )
        if ratio is not None and name == REPETITIVE and arm in WITHOUT_MODEL and not temperature and ratio.low <= 1.0:
            wrong.append(f"{arm} on {name} prompts at T = 0: {ratio} of plain, more than 1 wanted")
    columns = ("drafter", "tokens a target pass", "kept", "tok/s", "speed over plain")
    report.table(f"{name.capitalize()} prompts, T = {temperature:g}", columns, rows)
    report.data[f"{name}, T = {temperature:g}"] = {
        arm: {
            "tokens_per_pass": cell.tokens_per_pass,
            "tokens_per_s": [[sample.tokens_per_s for sample in each] for each in cell.samples],
        }
        for arm, cell in cells.items()
    }
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="94M", choices=["94M", "111M", "1b"], help="of the widened target")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of both")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=24, help="of each set")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    report = Report("drafters", "Drafters without a model")
    report.text(
        f"The demo pair, its target WIDENED to {options.size}, {options.dtype}, placed as `outrider up` places it; one "
        f"answer at a time, {options.max_tokens} tokens each, {options.repetitions} repetitions. In brackets the "
        "interval of 95 % from a bootstrap over prompts."
    )
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    sets = {
        REPETITIVE: of_all_kinds(read_prompts(REPETITIVE), options.prompts),
        DEV: read_prompts(DEV)[: options.prompts],  # the same in all benchmarks
    }
    for name, chosen in sets.items():
        numbers = numbers_by_kind(chosen)
        report.text(f"{name.capitalize()}: " + ", ".join(f"{number} {kind}" for kind, number in numbers.items()) + ".")
        report.data[f"{name} prompts"] = numbers
    common = {"dtype": options.dtype, "prefix_caching": False}
    target, draft = {"model": str(widened(options.size)), **common}, {"model": str(DEMO_DRAFT), **common}
    wrong: list[str] = []
    with running(target, draft) as endpoints:
        for name, chosen in sets.items():
            arms = list(ARMS) if name == REPETITIVE else [PLAIN, *WITHOUT_MODEL]
            prompts = [tokenizer.encode(prompt.text).ids[-PROMPT_TOKENS:] for prompt in chosen]
            for temperature in options.temperatures:
                found = asyncio.run(
                    in_turn(
                        endpoints.grpc,
                        prompts,
                        {arm: ARMS[arm] for arm in arms},
                        temperature=temperature,
                        max_tokens=options.max_tokens,
                        repetitions=options.repetitions,
                    )
                )
                cells = {arm: Cell(samples) for arm, samples in found.items()}
                wrong += add_cells(report, name, temperature, cells)
                add_kinds(report, name, temperature, chosen, cells)
    report.verdict(wrong)
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
