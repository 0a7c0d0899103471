"""Compare ways to speculate on the demo pair: acceptance rules, scaffolds, or trees.

    make bench-rules                                  # or: python -m benchmarks.arms rules --help
    make bench-scaffolds
    make bench-trees

Each prompt is answered by every arm in turn before the next one, in another order each time, so that a drift of the
machine hits all alike, and under a cache salt of its own: no prefix is found again, and `lookup` sees nothing of the
answer that another arm gave. Tokens a pass depend on the pair, the text and the arm; speeds on the machine as well. A
ratio is that of two answers to one prompt in one repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import (
    DEMO_DRAFT,
    DEMO_PASS,
    DEMO_TARGET,
    HELD_OUT,
    Prompt,
    Report,
    parser,
    read_prompts,
    widened,
)
from benchmarks.passes import Ratio, Sample, in_turn
from benchmarks.running import running
from benchmarks.widen_head import widen_embeddings
from outrider.client import AcceptanceRule, Drafter, Speculation
from outrider.engine.heads.checkpoint import TargetFiles
from outrider.engine.loading.lookahead_embeddings import read_embeddings
from outrider.wire.requests.lookahead_shape import LookaheadShape
from outrider.wire.requests.tree_shape import TreeShape

PLAIN, EXACT, LENIENT = "plain", "rejection", "lenience 0.5"
RULES: Mapping[str, Speculation] = {
    EXACT: Speculation(),
    "rejection by token": Speculation(lenience=1 - 1e-6),  # the rule under lenience, and next to none of it
    "coupled": Speculation(acceptance=AcceptanceRule.COUPLED),
    "lenience 0.8": Speculation(lenience=0.8),
    LENIENT: Speculation(lenience=0.5),
}
TREES = ("4x2x1", "3x1x1x1", "2x2x2", "best:12x4", "best:16x6")
GAINS_FROM = (1.0, 4)
"""Temperature, and K, from which the gain of lenience must show."""
PROMPT_TOKENS = 512
CHAIN_K = 4
"""Draft tokens of those beside lookahead and PaSS, where all are verified in every step."""

Value = Callable[[Sample], float]


def per_pass(sample: Sample) -> float:
    return sample.num_tokens / len(sample.rounds)


def per_full_round(sample: Sample) -> float:
    """Return the mean tokens, 1 + kept, of the rounds with the most drafts: all K of a chain."""
    most = max(item.num_drafted for item in sample.rounds)
    return statistics.fmean(1.0 + item.num_accepted for item in sample.rounds if item.num_drafted == most)


def speed(sample: Sample) -> float:
    return sample.tokens_per_s


@dataclass(frozen=True)
class Cell:
    """Answers of one arm to some prompts at one temperature."""

    name: str
    by_prompt: list[list[Sample]]
    """A sample each repetition."""

    @property
    def texts(self) -> list[list[list[int]]]:
        """Return the ids by prompt and repetition."""
        return [[sample.outputs[0] for sample in each] for each in self.by_prompt]

    def mean(self, value: Value) -> float:
        return statistics.fmean(value(sample) for each in self.by_prompt for sample in each)

    def over(self, other: Cell, value: Value) -> Ratio:
        """Return the ratio answer by answer: the median of speeds, the mean of counts."""
        pairs = zip(self.by_prompt, other.by_prompt, strict=True)
        ratios = [[value(a) / value(b) for a, b in zip(*pair, strict=True)] for pair in pairs]
        return Ratio.of(ratios, np.median if value is speed else np.mean)

    @property
    def row(self) -> list[str]:
        rounds = [item for each in self.by_prompt for sample in each for item in sample.rounds]
        drafted, kept = sum(item.num_drafted for item in rounds), sum(item.num_accepted for item in rounds)
        share = f"{100 * kept / drafted:.0f} %" if drafted else ""
        rate = statistics.median(sample.tokens_per_s for each in self.by_prompt for sample in each)
        return [self.name, f"{drafted / len(rounds):.1f}", share, f"{self.mean(per_pass):.3f}", f"{rate:.1f}"]

    def data(self, *values: Value) -> dict[str, list[list[float]]]:
        """Return values of each answer by their names, by prompt and repetition: what a report keeps."""
        return {each.__name__: [[each(sample) for sample in samples] for samples in self.by_prompt] for each in values}


class Bench:
    """One running pair, and what the suites measure on it."""

    def __init__(self, report: Report, address: str, options: argparse.Namespace) -> None:
        self.report, self._address, self._options = report, address, options
        self._tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))

    def cells(self, prompts: Sequence[Prompt], arms: Mapping[str, Speculation], temperature: float) -> dict[str, Cell]:
        found = asyncio.run(
            in_turn(
                self._address,
                [self._tokenizer.encode(prompt.text).ids[-PROMPT_TOKENS:] for prompt in prompts],
                arms,
                temperature=temperature,
                max_tokens=self._options.max_tokens,
                repetitions=self._options.repetitions,
            )
        )
        return {name: Cell(name, samples) for name, samples in found.items()}

    def add(self, heading: str, cells: Mapping[str, Cell], base: Cell, value: Value = speed) -> dict[str, Ratio]:
        """Add a table and its data. Return the ratios over `base`, by arm."""
        ratios = {name: cell.over(base, value) for name, cell in cells.items() if cell is not base}
        what = ("speed" if value is speed else "tokens a full round") + f" over {base.name}"
        columns = ("arm", "drafted a pass", "kept", "tokens a pass", "tok/s", what)
        rows = [[*cell.row, str(ratios.get(name, ""))] for name, cell in cells.items()]
        self.report.table(heading, columns, rows)
        self.report.data[heading] = {cell.name: cell.data(per_pass, speed) for cell in cells.values()}
        return ratios


def rules(bench: Bench, options: argparse.Namespace) -> list[str]:
    """Fail where lenience keeps fewer than the exact rule, or, for K = 4 and more at temperature 1, no more."""
    wrong = []
    for temperature in options.temperatures:
        for k in options.k:
            arms = {
                rule: Speculation(num_draft_tokens=k, acceptance=each.acceptance, lenience=each.lenience)
                for rule, each in RULES.items()
            }
            cells = bench.cells(read_prompts(HELD_OUT)[: options.prompts], arms, temperature)
            where = f"T = {temperature:g}, K = {k}"
            gain = bench.add(where, cells, cells[EXACT], per_full_round)[LENIENT]
            if gain.high < 1.0 or ((temperature, k) >= GAINS_FROM and gain.low <= 1.0):
                wrong.append(f"{where}: {LENIENT} keeps {gain} of what the exact rule keeps")
    return wrong


def scaffolds(bench: Bench, options: argparse.Namespace) -> list[str]:
    """Compare lookahead decoding and PaSS with other drafters, where they pay and in every step. Fail where a text at
    temperature 0 is another.
    """
    wrong = list[str]()
    shape, embeddings = LookaheadShape.parse(options.shape), read_embeddings(str(options.embeddings), demo_width())
    most = {Drafter.LOOKAHEAD: shape.most_nodes - shape.num_window_tokens, Drafter.PASS: len(embeddings)}
    names = (Drafter.MODEL, Drafter.NGRAM, Drafter.NGRAM_MODEL, *most)
    arms = {PLAIN: Speculation(enabled=False)} | {name: Speculation(drafter=name) for name in names}
    for name in names:
        k = most.get(name, CHAIN_K)
        arms[f"{name}, K = {k}"] = Speculation(drafter=name, num_draft_tokens=k)
    for temperature in options.temperatures:
        cells = bench.cells(read_prompts(HELD_OUT)[: options.prompts], arms, temperature)
        bench.add(f"T = {temperature:g}", cells, cells[PLAIN])
        if not temperature:
            wrong += [f"{name} changes the text" for name, cell in cells.items() if cell.texts != cells[PLAIN].texts]
    return wrong


def demo_width() -> int:
    return TargetFiles(str(DEMO_TARGET)).width


def trees(bench: Bench, options: argparse.Namespace) -> list[str]:
    """Compare each tree with the best chain as deep as it, and with the best that has as many tokens verified.

    The first asks the target for fewer tokens, the second is deeper; best over the acceptance rules of chains.
    """
    shapes = [TreeShape.parse(text) for text in options.trees]
    lengths = sorted({count for shape in shapes for count in (shape.depth, shape.most_nodes)})
    for temperature in options.temperatures:
        tree_arms: dict[str, tuple[TreeShape, Speculation]] = {}
        chain_arms: dict[str, tuple[int, Speculation]] = {}
        for rule in (None,) if temperature == 0 else tuple(AcceptanceRule):
            suffix = "" if rule is None else f", {rule.value}"
            for shape in shapes:
                tree_arms[f"tree {shape}{suffix}"] = (shape, Speculation(tree=str(shape), acceptance=rule))
            for k in lengths:
                chain_arms[f"chain of {k}{suffix}"] = (k, Speculation(num_draft_tokens=k, acceptance=rule))
        arms = {name: speculation for name, (_, speculation) in (tree_arms | chain_arms).items()}
        arms = {PLAIN: Speculation(enabled=False), **arms}
        cells = bench.cells(read_prompts(HELD_OUT)[: options.prompts], arms, temperature)
        bench.add(f"T = {temperature:g}", cells, cells[PLAIN])
        compared = []
        for name, (shape, _) in tree_arms.items():
            for why, k in (("as deep", shape.depth), ("as many verified", shape.most_nodes)):
                for value in (per_pass, speed):
                    best = max((cells[each] for each in chain_arms if chain_arms[each][0] == k), key=of(value))
                    what = "speed" if value is speed else "tokens a pass"
                    compared.append([name, f"{why}: {best.name}", what, str(cells[name].over(best, value))])
        bench.report.table(f"Trees over chains, T = {temperature:g}", ("tree", "chain", "of", "ratio"), compared)
        tree = max((cells[name] for name in tree_arms), key=of(speed))
        other = max((cells[name] for name in (PLAIN, *chain_arms)), key=of(speed))
        bench.report.text(
            f"Fastest at T = {temperature:g}: of the trees {tree.name}, of the rest {other.name}. The first is "
            f"{tree.over(other, speed)} times as fast as the second."
        )
    return []


def of(value: Value) -> Callable[[Cell], float]:
    return lambda cell: cell.mean(value)


SUITES = {
    "rules": (rules, "What the acceptance rules keep"),
    "scaffolds": (scaffolds, "Lookahead decoding and PaSS"),
    "trees": (trees, "Trees of drafts against chains"),
}


def main() -> int:
    suite = sys.argv[1] if len(sys.argv) > 1 else ""
    if suite not in SUITES:
        sys.exit(f"say what to compare: {', '.join(SUITES)}")
    run, title = SUITES[suite]
    size, answers = {"size": "94M", "dtype": "float32"}, {"temperatures": [0.0, 1.0], "prompts": 24, "max_tokens": 64}
    if suite == "rules":  # counts, for which the small target does
        made = parser(__doc__, temperatures=[0.6, 1.0], prompts=24, max_tokens=128, repetitions=3, k=[1, 4, 8])
    elif suite == "scaffolds":
        made = parser(__doc__, **size, **{**answers, "prompts": 12, "max_tokens": 96}, repetitions=1, shape="5,4,5")
        made.add_argument("--embeddings", type=Path, default=DEMO_PASS, help="of the demo target, for PaSS")
    else:
        made = parser(__doc__, **size, **answers, repetitions=1, trees=list(TREES))
    options = made.parse_args(sys.argv[2:])
    target, wide = DEMO_TARGET, ""
    if suite != "rules":
        target, wide = widened(options.size), f", its target WIDENED to {options.size}, {options.dtype}"
    common = {"dtype": "float32" if suite == "rules" else options.dtype, "prefix_caching": False}
    report = Report(suite, title)
    report.text(
        f"The demo pair{wide}, placed as `outrider up` places it; {options.prompts} prompts of a kind, one answer at a "
        f"time, {options.max_tokens} tokens each, {options.repetitions} repetitions. In brackets the interval of 95 % "
        "from a bootstrap over prompts."
    )
    with tempfile.TemporaryDirectory() as folder:
        own = {}
        if suite == "scaffolds":
            widen_embeddings(options.embeddings, DEMO_TARGET, target, Path(folder))
            own = {"lookahead": options.shape, "lookahead_embeddings": folder}
        with running({"model": str(target), **common, **own}, {"model": str(DEMO_DRAFT), **common}) as endpoints:
            wrong = run(Bench(report, endpoints.grpc, options), options)
    report.verdict(wrong)
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
