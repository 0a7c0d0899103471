"""Compare trees of drafts with chains: tokens per target pass and speed, on held-out text.

    make bench-trees                                  # or: python -m benchmarks.trees --help

Each tree is compared with the best chain as deep as it (which asks the target for fewer tokens) and with the best chain
that has as many tokens verified (which is deeper): best over the acceptance rules of chains. Each prompt is answered by
every arm in turn before the next one, in another order each time, so that a drift of the machine hits all alike, and
under a cache salt of its own. Tokens per pass depend on the pair, the text and the shape; speed on the machine as well.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, RESULTS, Report, dev_prompts, widened
from benchmarks.passes import Sample, in_turn
from benchmarks.running import running
from outrider.client import AcceptanceRule, Speculation
from outrider.wire.tree_shape import TreeShape

TREES = ("4x2x1", "3x1x1x1", "2x2x2", "best:12x4", "best:16x6")
PROMPT_TOKENS = 512
NUM_RESAMPLES = 2000
PLAIN = "plain"


@dataclass(frozen=True)
class Arm:
    name: str
    speculation: Speculation
    tree: TreeShape | None = None
    k: int = 0
    """Draft tokens of a chain."""
    by_prompt: list[list[Sample]] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        return float(np.mean([_per_pass(sample) for each in self.by_prompt for sample in each]))

    @property
    def num_drafted(self) -> float:
        """Mean tokens that a round had verified."""
        rounds = [item for each in self.by_prompt for sample in each for item in sample.rounds]
        return statistics.fmean(item.num_drafted for item in rounds)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(sample.tokens_per_s for each in self.by_prompt for sample in each)

    def over(self, other: Arm, value: Callable[[Sample], float]) -> str:
        """Return the mean ratio of the answers, and the interval of 95 % from a bootstrap that draws whole prompts."""
        pairs = zip(self.by_prompt, other.by_prompt, strict=True)
        ratios = np.array([[value(a) / value(b) for a, b in zip(*pair, strict=True)] for pair in pairs]).mean(axis=1)
        rng = np.random.default_rng(0)
        means = ratios[rng.integers(len(ratios), size=(NUM_RESAMPLES, len(ratios)))].mean(axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        return f"{ratios.mean():.3f} ({low:.3f}-{high:.3f})"


def _per_pass(sample: Sample) -> float:
    return sample.num_tokens / len(sample.rounds)


def _speed(sample: Sample) -> float:
    return sample.tokens_per_s


def arms_of(trees: Sequence[TreeShape], rules: Sequence[AcceptanceRule | None]) -> list[Arm]:
    """Return all arms. rules: None for the only one there is at temperature 0."""
    lengths = sorted({n for tree in trees for n in (tree.depth, tree.most_nodes)})
    arms = [Arm(PLAIN, Speculation(enabled=False))]
    for rule in rules:
        suffix = "" if rule is None else f", {rule.value}"
        for tree in trees:
            arms.append(Arm(f"tree {tree}{suffix}", Speculation(tree=str(tree), acceptance=rule), tree=tree))
        for k in lengths:
            arms.append(Arm(f"chain of {k}{suffix}", Speculation(num_draft_tokens=k, acceptance=rule), k=k))
    return arms


def add_tables(report: Report, temperature: float, arms: Sequence[Arm]) -> None:
    plain = arms[0]
    rows = [
        [
            arm.name,
            f"{arm.num_drafted:.1f}",
            f"{arm.tokens_per_pass:.3f}",
            f"{arm.tokens_per_s:.1f}",
            "" if arm is plain else arm.over(plain, _speed),
        ]
        for arm in arms
    ]
    columns = ("arm", "verified a pass", "tokens a pass", "tok/s", "speed over plain")
    report.table(f"T = {temperature:g}", columns, rows)
    chains, compared = [arm for arm in arms if arm.k], list[list[str]]()
    for arm in arms:
        if arm.tree is None:
            continue
        for why, k in (("as deep", arm.tree.depth), ("as many verified", arm.tree.most_nodes)):
            for value, what in ((_per_pass, "tokens a pass"), (_speed, "speed")):
                best = _best([chain for chain in chains if chain.k == k], value)
                compared.append([arm.name, f"{why}: {best.name}", what, arm.over(best, value)])
    report.table(f"Trees over chains, T = {temperature:g}", ("tree", "chain", "of", "ratio"), compared)
    trees = [arm for arm in arms if arm.tree is not None]
    best_tree, best_chain = _best(trees, _speed), _best([plain, *chains], _speed)
    report.text(
        f"Fastest at T = {temperature:g}: of the trees {best_tree.name}, of the rest {best_chain.name}. The first is "
        f"{best_tree.over(best_chain, _speed)} times as fast as the second."
    )
    report.data[f"T = {temperature:g}"] = {
        arm.name: {
            "tokens_per_pass": arm.tokens_per_pass,
            "verified": arm.num_drafted,
            "tokens_per_s": [[sample.tokens_per_s for sample in each] for each in arm.by_prompt],
        }
        for arm in arms
    }


def _best(arms: Sequence[Arm], value: Callable[[Sample], float]) -> Arm:
    return max(arms, key=lambda arm: statistics.fmean(value(sample) for each in arm.by_prompt for sample in each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="94M", choices=["94M", "111M", "1b"], help="of the widened target")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of both")
    parser.add_argument("--trees", type=TreeShape.parse, nargs="+", default=[TreeShape.parse(text) for text in TREES])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    report = Report("trees", "Trees of drafts against chains")
    report.text(
        f"The demo pair, its target WIDENED to {options.size}, {options.dtype}, placed as `outrider up` places it; "
        f"{options.prompts} prompts of held-out text, one answer at a time, {options.max_tokens} tokens each, "
        f"{options.repetitions} repetitions. In brackets the interval of 95 % from a bootstrap over prompts."
    )
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids[-PROMPT_TOKENS:] for text in dev_prompts(options.prompts)]
    common: Mapping[str, object] = {"dtype": options.dtype, "prefix_caching": False}
    target, draft = {"model": str(widened(options.size)), **common}, {"model": str(DEMO_DRAFT), **common}
    with running(target, draft) as endpoints:
        for temperature in options.temperatures:
            rules = (None,) if temperature == 0 else tuple(AcceptanceRule)
            arms = arms_of(options.trees, rules)
            found = asyncio.run(
                in_turn(
                    endpoints.grpc,
                    prompts,
                    {arm.name: arm.speculation for arm in arms},
                    temperature=temperature,
                    max_tokens=options.max_tokens,
                    repetitions=options.repetitions,
                )
            )
            for arm in arms:
                arm.by_prompt.extend(found[arm.name])
            add_tables(report, temperature, arms)
    report.write(options.results)


if __name__ == "__main__":
    main()
