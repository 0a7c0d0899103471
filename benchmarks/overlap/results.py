"""What a group measured, and its file: a group that has one is not measured again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.overlap.costs import Costs
from benchmarks.overlap.groups import Group
from benchmarks.overlap.shapes import Shape

PLAIN, PLAIN_BOTH = "plain", "plain, both cores"
CHAIN, TREE, CHAIN_BOTH = "colocated chain", "colocated tree", "colocated chain, both cores"
PLAIN_TODAY, PLAIN_LEASE = "plain, today", "plain, lease"
TODAY, OVERLAP_CHAIN, OVERLAP_TREE = "today", "overlap chain", "overlap tree"
LOCAL = (PLAIN, CHAIN, TREE, PLAIN_BOTH, CHAIN_BOTH)
"""Arms without a network."""
ON_ONE_CORE = (PLAIN, CHAIN, TREE)
"""Those on the target's own core."""
OVERLAPPED = (OVERLAP_CHAIN, OVERLAP_TREE)
PARTS = ("target", "draft", "gateway")
FATES = ("verified", "late", "pruned")
"""Of delivered nodes, by what became of them, of those that are told."""
SPLIT = (PLAIN_TODAY, PLAIN_LEASE, TODAY, *OVERLAPPED)
"""Arms with a core for the draft and the gateway and one for the target."""


@dataclass(frozen=True)
class Measured:
    """One answer of one arm. Tokens, seconds and steps are those after its first verdict, `counts` those of all."""

    arm: str
    round_trip: float | None
    """In steps of the target; None without a network."""
    repetition: int
    prompt: int
    """Its index."""
    ids: list[int]
    num_tokens: int
    seconds: float
    num_steps: int
    num_drafted: int
    num_accepted: int
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass
class Tuned:
    """What the arms that take turns were tuned to."""

    chain: int
    chain_both: int
    tree: Shape | None = None
    today: dict[float, int] = field(default_factory=dict)
    """K by round trip."""


@dataclass
class GroupResult:
    """All of one group."""

    group: Group
    base: str
    """Which commit `today` is, and what it ran in."""
    max_tokens: int
    costs: Costs
    """Without services."""
    tuned: Tuned
    round_trips_s: dict[float, float] = field(default_factory=dict)
    """What each round trip was, as measured, by what it was to be."""
    answers: list[Measured] = field(default_factory=list)
    contention: list[float] = field(default_factory=list)
    """What a forward of the target takes while the draft makes steps on the other core, over what it takes alone; of
    each repetition."""
    num_repetitions: int = 0
    minutes: float = 0.0
    load_at_start: float = 0.0
    """Processes that wanted a core before anything was started, a minute's mean."""

    @property
    def step_s(self) -> float:
        """A forward of the target for one token: the unit of round trips."""
        return self.costs.verify[1]

    def cell(self, arm: str, round_trip: float | None) -> Cell | None:
        """Return the answers of an arm; None where there are none."""
        found = [each for each in self.answers if each.arm == arm and each.round_trip == round_trip]
        return Cell(arm, round_trip, found) if found else None

    def cells(self) -> list[Cell]:
        """Return those that there are, arms without a network first."""
        local = [self.cell(arm, None) for arm in LOCAL]
        far = [self.cell(arm, round_trip) for round_trip in self.round_trips_s for arm in SPLIT]
        return [cell for cell in (*local, *far) if cell is not None]


@dataclass(frozen=True)
class Cell:
    """Answers of one arm over one network."""

    arm: str
    round_trip: float | None
    answers: Sequence[Measured]

    def total(self, name: str) -> float:
        """Return the sum of a field of the answers, or of one of their counts."""
        return sum(each.counts[name] if name in each.counts else getattr(each, name) for each in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.total("num_tokens") / self.total("seconds")

    @property
    def tokens_per_step(self) -> float:
        return self.total("num_tokens") / self.total("num_steps")

    @property
    def step_s(self) -> float:
        """From verdict to verdict."""
        return self.total("seconds") / self.total("num_steps")

    def idle(self, part: str) -> float:
        """Return the share of the time in which "target" or "draft" made no step."""
        return max(0.0, 1.0 - self.total(f"{part}_busy") / self.total("elapsed"))

    @property
    def target_rows(self) -> int:
        """Mean rows of a step of the target, to the nearest."""
        return round(1 + self.total("num_drafted") / self.total("num_steps"))

    @property
    def hit_rate(self) -> float | None:
        looked = self.total("hits") + self.total("misses") if self.arm in OVERLAPPED else 0.0
        return self.total("hits") / looked if looked else None

    @property
    def draft_rows(self) -> float:
        """Mean nodes that a step of the draft was fed; 1 where they are not counted."""
        return max(1.0, self.total("draft_nodes") / self.total("draft_steps")) if self.arm in OVERLAPPED else 1.0

    def over(self, other: Cell) -> list[list[float]]:
        """Return ratios of speeds by prompt, one a repetition."""
        theirs = {(each.prompt, each.repetition): each.tokens_per_s for each in other.answers}
        by_prompt: dict[int, list[float]] = {}
        for each in self.answers:
            by_prompt.setdefault(each.prompt, []).append(each.tokens_per_s / theirs[each.prompt, each.repetition])
        return list(by_prompt.values())


def save(result: GroupResult, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result)), encoding="utf-8")


def read(path: Path) -> GroupResult:
    values = json.loads(path.read_text(encoding="utf-8"))
    tuned, costs, tree = values["tuned"], values["costs"], values["tuned"]["tree"]
    for name in ("verify", "draft"):
        costs[name] = {int(rows): seconds for rows, seconds in costs[name].items()}
    tuned["tree"] = None if tree is None else Shape(tuple(map(tuple, tree["paths"])))
    tuned["today"] = _by_round_trip(tuned["today"])
    return GroupResult(
        **values
        | {
            "group": Group(**values["group"]),
            "costs": Costs(**costs),
            "tuned": Tuned(**tuned),
            "round_trips_s": _by_round_trip(values["round_trips_s"]),
            "answers": [Measured(**each) for each in values["answers"]],
        }
    )


def _by_round_trip(values: dict[str, Any]) -> dict[float, Any]:
    return {float(name): value for name, value in values.items()}
