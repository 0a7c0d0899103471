"""Compare ways to speculate on the demo pair: acceptance rules, drafters without a model, scaffolds, unions, or trees.

    make bench-rules                                  # or: python -m benchmarks.arms rules --help
    make bench-drafters
    make bench-scaffolds
    make bench-unions
    make bench-trees

Each prompt is answered by every arm in turn before the next one, in another order each time, so that a drift of the
machine hits all alike, and under a cache salt of its own: no prefix is found again, and `lookup` sees nothing of the
answer that another arm gave. Tokens a pass depend on the pair, the text and the arm; speeds on the machine as well. A
ratio is that of two answers to one prompt in one repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import (
    DEMO_DRAFT,
    DEMO_PASS,
    DEMO_TARGET,
    HELD_OUT,
    REPETITIVE,
    Prompt,
    Report,
    of_all_kinds,
    parser,
    read_prompts,
    widened,
)
from benchmarks.passes import Ratio, Sample, in_turn_at
from benchmarks.running import running
from benchmarks.widen_head import widen_embeddings
from outrider.cli.supervisor import Endpoints
from outrider.client import AcceptanceRule, AsyncClient, Drafter, Speculation
from outrider.engine.heads.target_files import TargetFiles
from outrider.engine.loading.lookahead_embeddings import read_embeddings
from outrider.wire.lookahead_shape import LookaheadShape
from outrider.wire.tree_shape import TreeShape
from tests.stack import read_metrics

PLAIN, EXACT, LENIENT = "plain", "rejection", "lenience 0.5"
WITHOUT_MODEL = ("ngram", "lookup")
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
LEAST_RATIO = 0.98
"""Least median speed of a drafter without a model, as a share of plain decoding's, where nothing repeats."""
PROMPT_TOKENS = 512
DRAFT_PASSES = 'outrider_worker_batch_size_count{worker="draft"}'
CHAIN_K = 4
"""Draft tokens of those beside lookahead and PaSS, where all are verified in every step."""

Value = Callable[[Sample], float]


def in_each(drafter: Drafter) -> str:
    return f"{drafter.value}, K = {CHAIN_K}"


TABLE = "ngram"
DRAFTED_FOR = {f"{name}, drafted by {TABLE}": name for name in (Drafter.MODEL.value, in_each(Drafter.MODEL))}
"""Arms whose draft is drafted for by a table, and which they are without it."""


def per_pass(sample: Sample) -> float:
    return sample.num_tokens / len(sample.rounds)


def per_full_round(sample: Sample) -> float:
    """Return the mean tokens, 1 + kept, of the rounds with the most drafts: all K of a chain."""
    most = max(item.num_drafted for item in sample.rounds)
    return statistics.fmean(1.0 + item.num_accepted for item in sample.rounds if item.num_drafted == most)


def speed(sample: Sample) -> float:
    return sample.tokens_per_s


def draft_passes_a_token(sample: Sample) -> float:
    return sample.num_draft_passes / sample.num_tokens


def num_draft_passes(pair: Endpoints) -> float:
    """Return how many forwards a pair's draft has run."""
    return read_metrics(f"http://{pair.first('draft').metrics}/metrics")[DRAFT_PASSES]


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


class Bench:
    """Running pairs, and what the suites measure on them."""

    def __init__(
        self, report: Report, pair: Endpoints, options: argparse.Namespace, drafted_for: Endpoints | None = None
    ) -> None:
        """drafted_for: a pair whose draft is drafted for by a table; arms named in DRAFTED_FOR are its."""
        self.report, self._options = report, options
        self._pair, self._drafted_for = pair, drafted_for or pair
        self._tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))

    def cells(self, prompts: Sequence[Prompt], arms: Mapping[str, Speculation], temperature: float) -> dict[str, Cell]:
        pairs = {name: self._drafted_for if name in DRAFTED_FOR else self._pair for name in arms}
        found = asyncio.run(self._in_turn(pairs, prompts, arms, temperature))
        return {name: Cell(name, samples) for name, samples in found.items()}

    async def _in_turn(
        self,
        pairs: Mapping[str, Endpoints],
        prompts: Sequence[Prompt],
        arms: Mapping[str, Speculation],
        temperature: float,
    ) -> dict[str, list[list[Sample]]]:
        async with contextlib.AsyncExitStack() as clients:
            of_pair = {id(pair): await clients.enter_async_context(AsyncClient(pair.grpc)) for pair in pairs.values()}
            return await in_turn_at(
                {name: of_pair[id(pair)] for name, pair in pairs.items()},
                [self._tokenizer.encode(prompt.text).ids[-PROMPT_TOKENS:] for prompt in prompts],
                arms,
                temperature=temperature,
                max_tokens=self._options.max_tokens,
                repetitions=self._options.repetitions,
                draft_passes={name: partial(num_draft_passes, pair) for name, pair in pairs.items()},
            )

    def add(self, heading: str, cells: Mapping[str, Cell], base: Cell, value: Value = speed) -> dict[str, Ratio]:
        """Add a table and its data. Return the ratios over `base`, by arm."""
        ratios = {name: cell.over(base, value) for name, cell in cells.items() if cell is not base}
        what = ("speed" if value is speed else "tokens a full round") + f" over {base.name}"
        columns = ("arm", "drafted a pass", "kept", "tokens a pass", "tok/s", what)
        rows = [[*cell.row, str(ratios.get(name, ""))] for name, cell in cells.items()]
        self.report.table(heading, columns, rows)
        self.report.data[heading] = {
            cell.name: {
                value.__name__: [[value(sample) for sample in each] for each in cell.by_prompt]
                for value in (per_pass, speed)
            }
            for cell in cells.values()
        }
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


def drafters(bench: Bench, options: argparse.Namespace) -> list[str]:
    """Fail where a drafter without a model is slower on held-out text, or no faster, greedy, on text that repeats."""
    wrong = []
    sets = {
        REPETITIVE: of_all_kinds(read_prompts(REPETITIVE), options.prompts),
        HELD_OUT: read_prompts(HELD_OUT)[: options.prompts],  # the same in all benchmarks
    }
    for name, prompts in sets.items():
        kinds = Counter(prompt.kind for prompt in prompts)
        bench.report.text(f"{name.capitalize()}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}.")
        names = (*WITHOUT_MODEL, "model", "ngram+model") if name == REPETITIVE else WITHOUT_MODEL
        arms = {PLAIN: Speculation(enabled=False), **{each: Speculation(drafter=Drafter(each)) for each in names}}
        for temperature in options.temperatures:
            cells = bench.cells(prompts, arms, temperature)
            where = f"{name} prompts, T = {temperature:g}"
            ratios = bench.add(where.capitalize(), cells, cells[PLAIN])
            for arm in WITHOUT_MODEL:
                if name == HELD_OUT and ratios[arm].middle < LEAST_RATIO:
                    wrong.append(f"{arm}, {where}: {ratios[arm]} of plain, at least {LEAST_RATIO:g} wanted")
                if name == REPETITIVE and not temperature and ratios[arm].low <= 1.0:
                    wrong.append(f"{arm}, {where}: {ratios[arm]} of plain, more than 1 wanted")
            for kind in kinds:
                indices = [index for index, prompt in enumerate(prompts) if prompt.kind == kind]
                of_kind = {arm: Cell(arm, [cell.by_prompt[i] for i in indices]) for arm, cell in cells.items()}
                bench.add(f"{where.capitalize()}, {kind}", of_kind, of_kind[PLAIN])
    return wrong


def scaffolds(bench: Bench, options: argparse.Namespace) -> list[str]:
    """Compare lookahead decoding and PaSS with other drafters, where they pay and in every step. Fail where a text at
    temperature 0 is another.
    """
    wrong = list[str]()
    shape, embeddings = LookaheadShape.parse(options.shape), read_embeddings(str(options.embeddings), demo_width())
    most = {Drafter.LOOKAHEAD: shape.most_nodes - shape.num_scaffolds, Drafter.PASS: len(embeddings)}
    names = (Drafter.MODEL, Drafter.NGRAM, Drafter.NGRAM_MODEL, *most)
    arms = {PLAIN: Speculation(enabled=False)} | {name.value: Speculation(drafter=name) for name in names}
    for name in names:
        k = most.get(name, CHAIN_K)
        arms[f"{name.value}, K = {k}"] = Speculation(drafter=name, num_draft_tokens=k)
    for temperature in options.temperatures:
        cells = bench.cells(read_prompts(HELD_OUT)[: options.prompts], arms, temperature)
        bench.add(f"T = {temperature:g}", cells, cells[PLAIN])
        if not temperature:
            wrong += [f"{name} changes the text" for name, cell in cells.items() if cell.texts != cells[PLAIN].texts]
    return wrong


def unions(bench: Bench, options: argparse.Namespace) -> list[str]:
    """Compare two sources in one tree with each alone and with one after the other: where it pays, and always. And a
    draft for which a table drafts with the same draft alone.

    Fail where, greedy, it makes fewer tokens a pass with CHAIN_K drafts of each in a step than one of them does, or a
    draft that is drafted for takes as many passes as alone.
    """
    wrong, owns = [], (Drafter.NGRAM, Drafter.LOOKUP)
    names = (Drafter.MODEL, *owns, *(Drafter(f"{own.value}{sign}model") for sign in "+&" for own in owns))
    arms = {PLAIN: Speculation(enabled=False)} | {name.value: Speculation(drafter=name) for name in names}
    arms |= {in_each(name): Speculation(drafter=name, num_draft_tokens=CHAIN_K) for name in names}
    arms |= {name: arms[alone] for name, alone in DRAFTED_FOR.items()}
    for temperature in options.temperatures:
        cells = bench.cells(read_prompts(HELD_OUT)[: options.prompts], arms, temperature)
        bench.add(f"T = {temperature:g}", cells, cells[PLAIN])
        compared = []
        for own in owns:
            both = cells[in_each(Drafter(f"{own.value}&model"))]
            for part in (cells[in_each(Drafter.MODEL)], cells[in_each(own)]):
                ratio = both.over(part, per_pass)
                compared.append([both.name, part.name, str(ratio), str(both.over(part, speed))])
                if not temperature and ratio.middle <= 1.0:
                    wrong.append(f"{both.name}: {ratio} of the tokens a pass of {part.name}, more than 1 wanted")
        columns = ("both", "one", "tokens a pass", "speed")
        bench.report.table(f"Both over one, T = {temperature:g}", columns, compared)
        compared = []
        for name, other in DRAFTED_FOR.items():
            drafted_for, alone = cells[name], cells[other]
            fewer = drafted_for.over(alone, draft_passes_a_token)
            counts = [f"{cell.mean(draft_passes_a_token):.3f}" for cell in (alone, drafted_for)]
            rest = [str(drafted_for.over(alone, value)) for value in (per_pass, speed)]
            compared.append([name, *counts, str(fewer), *rest])
            if not temperature and fewer.middle >= 1.0:
                wrong.append(f"{name}: {fewer} of the draft's passes alone, fewer wanted")
        columns = ("arm", "draft passes a token alone", "drafted for", "ratio", "tokens a pass", "speed")
        bench.report.table(f"A draft that is drafted for over the same alone, T = {temperature:g}", columns, compared)
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
    "drafters": (drafters, "Drafters without a model"),
    "scaffolds": (scaffolds, "Lookahead decoding and PaSS"),
    "unions": (unions, "Two sources in one tree"),
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
    elif suite in ("drafters", "unions"):
        made = parser(__doc__, **size, **answers, repetitions=2)
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
    with contextlib.ExitStack() as opened:
        folder, own = opened.enter_context(tempfile.TemporaryDirectory()), {}
        if suite == "scaffolds":
            widen_embeddings(options.embeddings, DEMO_TARGET, target, Path(folder))
            own = {"lookahead": options.shape, "lookahead_embeddings": folder}
        of_target, of_draft = {"model": str(target), **common, **own}, {"model": str(DEMO_DRAFT), **common}
        of_draft["metrics_port"] = 0
        pair, drafted_for = opened.enter_context(running(of_target, of_draft)), None
        if suite == "unions":
            drafted_for = opened.enter_context(running(of_target, {**of_draft, "drafted_by": TABLE}))
        wrong = run(Bench(report, pair, options, drafted_for), options)
    report.verdict(wrong)
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
