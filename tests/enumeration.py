"""Goes through every way in which the draws of a run can come out, so that laws are added up and not sampled.

A number is not drawn but known to lie in an interval, which each look at it narrows: a number that is looked at twice,
by two rules or in two steps, is one number there too. The product's own functions are run, with `every_draw` in the
place of their inverse CDF, and with `own_draw` for what the target draws itself: by a number a position, as in service
by the numbers of its ids.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pytest

from outrider.engine.sampling import token_distribution
from outrider.engine.sampling.acceptance import OwnDraw
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation import drawing

T = TypeVar("T")
Prefix = tuple[int, ...]
Law = Callable[[Prefix], TokenDistribution]
Interval = tuple[float, float]
NOTHING = 1e-14
"""Length of an interval that is rounding alone. Doubling it loses twice as much, far below any tolerance."""


class Chooser:
    """Takes the draws of one run as `script` says, and in the first way where that has ended."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self.ways: list[list[int]] = []
        """Of each draw, what it could be; what it was is the first."""
        self.probability = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        at = len(self.ways)
        ways = [way for way, weight in enumerate(weights) if weight > 0]
        if at < len(self._script):
            ways = ways[ways.index(self._script[at]) :]
        self.ways.append(ways)
        self.probability *= weights[ways[0]]
        return ways[0]

    def next_script(self) -> list[int] | None:
        """Of the next run: the last draw that could still be another is that. None after the last run."""
        ways = list(self.ways)
        while ways and len(ways[-1]) == 1:
            ways.pop()
        return [way[0] for way in ways[:-1]] + [ways[-1][1]] if ways else None


class Numbers:
    """The uniforms of a run by what they are keyed with; `known` of earlier steps."""

    def __init__(self, chooser: Chooser, known: dict[Hashable, Interval] | None = None) -> None:
        self.chooser = chooser
        self.known = dict(known or {})
        self._made: dict[Hashable, Number] = {}

    def __getitem__(self, key: Hashable) -> "Number":
        if key not in self._made:
            self._made[key] = Number.of(self, key)
        return self._made[key]

    def fresh(self, count: int) -> "list[Number]":
        """Return numbers that nobody else looks at."""
        return [self[object()] for _ in range(count)]


class Number(float):
    """A uniform in (0, 1). Its value as a float only names it, where `float()` has made it one."""

    numbers: Numbers
    key: Hashable
    _by_value: "dict[float, Number]" = {}  # noqa: RUF012

    @classmethod
    def of(cls, numbers: Numbers, key: Hashable) -> "Number":
        number = cls((len(numbers.known) + len(numbers._made) + 1) * 2.0**-20)
        number.numbers, number.key = numbers, key
        cls._by_value[float(number)] = number  # of the run that goes on now
        return number

    def part(self, edges: Sequence[float]) -> int:
        """Return in which of the parts of (0, 1) between these edges it lies, from 0."""
        low, high = self.numbers.known.get(self.key, (0.0, 1.0))
        bounds = [0.0, *(min(1.0, max(0.0, float(edge))) for edge in edges), 1.0]
        overlaps = [min(high, b) - max(low, a) for a, b in pairwise(bounds)]
        part = self.numbers.chooser.choose([each / (high - low) if each > NOTHING else 0.0 for each in overlaps])
        self.numbers.known[self.key] = max(low, bounds[part]), min(high, bounds[part + 1])
        return part

    def __lt__(self, bound: float) -> bool:
        return self.part([bound]) == 0


def drawn_place(weights: np.ndarray, u: float) -> int:
    cdf = np.cumsum(weights / weights.sum()).tolist()
    number = u if isinstance(u, Number) else Number._by_value[u]
    return number.part(cdf[:-1])


@pytest.fixture
def every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (drawing, token_distribution):
        monkeypatch.setattr(module, "draw_index", drawn_place)


def own_draw(number: Callable[[int], Number]) -> OwnDraw:
    """number: takes the place; returns what the target's own token there is drawn with."""
    return lambda place, weights, ids: drawn_place(weights, number(place))


def every_run(run: Callable[[Chooser], T]) -> Iterator[tuple[float, T]]:
    """Yield what each run gives, and how probable it is."""
    script: list[int] | None = []
    while script is not None:
        chooser = Chooser(script)
        result = run(chooser)
        yield chooser.probability, result
        script = chooser.next_script()


def random_law(vocab_size: int, seed: int, only: Sequence[int] | None = None, scale: float = 1.5) -> Law:
    """Of every prefix another; over `only` these ids, as sparse laws."""
    made: dict[Prefix, TokenDistribution] = {}

    def law(prefix: Prefix) -> TokenDistribution:
        if prefix not in made:
            generator = np.random.default_rng([seed, *prefix, 99])
            scores = (scale * generator.standard_normal(vocab_size)).astype(np.float32)
            ids = None if only is None else np.array(only)
            made[prefix] = TokenDistribution(vocab_size, scores if ids is None else scores[ids], ids).normalised()
        return made[prefix]

    return law
