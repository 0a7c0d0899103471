"""A group of `bench-overlap`: one size of the draft and one rule, measured with all its arms, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import DEMO_DRAFT, WORK
from outrider.lab.models.widening import Sizes, widen_folder
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import SamplingParams

DRAFTS: Mapping[float, Sizes] = {
    0.02: Sizes(hidden=320, intermediate=864, heads=5, kv_heads=1),
    0.05: Sizes(hidden=448, intermediate=1216, heads=7, kv_heads=1),
    0.1: Sizes(hidden=576, intermediate=1568, heads=9, kv_heads=1),
    0.2: Sizes(hidden=768, intermediate=2112, heads=12, kv_heads=1),
}
"""The demo draft widened, by what a step of it takes of a step of the target of 94M, about; the table has what it took.
"""
SCALES = {"94M": 1, "111M": 1, "375M": 2, "1b": 2}
"""How many times as wide these are made beside a target of a size: the shares are those of 94M, about."""
ROUND_TRIPS = (0.0, 0.05, 0.1, 0.5)
"""Of every link, in steps of the target."""
GREEDY, REJECTION, COUPLED = "greedy", "rejection", "coupled"


@dataclass(frozen=True)
class Group:
    """What its arms have in common."""

    cost: float
    """A key of DRAFTS."""
    rule: str
    """GREEDY, REJECTION (by block) or COUPLED."""
    temperature: float

    @property
    def name(self) -> str:
        """As on the command line, such as 0.1-coupled-1."""
        return f"{self.cost:g}-{self.rule}-{self.temperature:g}"

    @property
    def law(self) -> str:
        """Name of what traces of the pair depend on."""
        return f"{self.rule}-{self.temperature:g}"

    @property
    def determined(self) -> bool:
        """Whether drafts are guesses of a text that they cannot change."""
        return self.rule != REJECTION

    @property
    def acceptance(self) -> AcceptanceRule:
        return AcceptanceRule.COUPLED if self.rule == COUPLED else AcceptanceRule.REJECTION

    def params(self, seed: int, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            seed=seed,
            ignore_eos=True,
            acceptance=self.acceptance,
        )

    def draft(self, size: str) -> Path:
        """Return the folder of the draft widened for a target of that size, made when it is missing."""
        one, scale = DRAFTS[self.cost], SCALES[size]
        sizes = Sizes(one.hidden * scale, one.intermediate * scale, one.heads * scale, one.kv_heads * scale)
        folder = WORK / f"draft-{sizes.hidden}"
        if not (folder / "config.json").exists():
            torch.manual_seed(0)  # of weights that cost something and change nothing
            print(widen_folder(DEMO_DRAFT, folder, sizes), flush=True)
        return folder


def seed_of(repetition: int, index: int) -> int:
    """Return the seed of a prompt's answers in a repetition, the same for all arms."""
    return 1000 * repetition + index


def all_groups() -> list[Group]:
    """Return every group, the middle cost first: it says the most."""
    groups = list[Group]()
    for cost in sorted(DRAFTS, key=lambda each: abs(each - 0.1)):
        groups += [Group(cost, GREEDY, 0.0), Group(cost, COUPLED, 1.0), Group(cost, REJECTION, 1.0)]
        if cost == 0.1:
            groups += [Group(cost, COUPLED, 0.7), Group(cost, REJECTION, 0.7)]
    return groups
