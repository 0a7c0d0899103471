"""The draft's tree in the simulation: grown as `draft_service` grows it, by the chances of ranks, without rounds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.overlap.costs import Costs
from benchmarks.overlap.shapes import Path
from draft_service.growing.node_scheduler import MAX_OFFERS
from outrider.engine.speculation.plan import LEAST_CHANCE, MAX_DEPTH, MAX_FED
from outrider.engine.speculation.ranks import MAX_RANKS


@dataclass(frozen=True)
class Bounds:
    """Of a draft's tree, as `draft_service` has them."""

    least_chance: float = LEAST_CHANCE
    max_depth: int = MAX_DEPTH
    max_fed: int = MAX_FED
    max_ranks: int = MAX_RANKS
    most_offers: int = MAX_OFFERS


@dataclass
class Growing:
    """The draft's tree under what is committed, and when what it made is with the target."""

    shares: Sequence[float]
    costs: Costs
    bounds: Bounds
    now_s: float = 0.0
    """When the draft is through with its last step."""
    draft_s: float = 0.0
    children_s: dict[Path, list[float]] = field(default_factory=dict)
    """By node that was fed, when each of its children is with the target."""
    _unfed: list[tuple[float, Path]] = field(default_factory=lambda: [(-1.0, ())])

    def step(self) -> bool:
        """Feed the nodes that make the most of the draft's time; return whether there were any."""
        offers = self._offers()
        if not offers:
            return False
        count = best_count([-each for each, _ in offers], 0.0, lambda num: self._step_s(num) if num else math.inf)
        for offer in offers[count:]:
            heapq.heappush(self._unfed, offer)
        took_s = self._step_s(count)
        self.now_s += took_s
        self.draft_s += took_s
        for chance, path in offers[:count]:
            self.children_s[path] = []
            self._fill(path, -chance)
        return True

    def _step_s(self, num_rows: int) -> float:
        return self.costs.draft_s(num_rows) + self.costs.draft_service_s

    @property
    def _is_done(self) -> bool:
        """Whether nothing is worth a step."""
        return not self._unfed or -self._unfed[0][0] * self.shares[0] < self.bounds.least_chance

    def _offers(self) -> list[tuple[float, Path]]:
        """Take out the likeliest nodes; those that are too deep stay, for what is committed next is nearer to them."""
        found, deep = list[tuple[float, Path]](), list[tuple[float, Path]]()
        while (
            len(found) < min(self.bounds.most_offers, self.bounds.max_fed - len(self.children_s)) and not self._is_done
        ):
            offer = heapq.heappop(self._unfed)
            (found if len(offer[1]) < self.bounds.max_depth else deep).append(offer)
        for offer in deep:
            heapq.heappush(self._unfed, offer)
        return found

    def _fill(self, path: Path, chance: float) -> None:
        """Make the children that are wanted of a node that was fed."""
        children = self.children_s[path]
        num_likely = sum(chance * share >= self.bounds.least_chance for share in self.shares[: self.bounds.max_ranks])
        for rank in range(len(children), max(1, num_likely)):
            children.append(self.now_s + self.costs.round_trip_s / 2)
            heapq.heappush(self._unfed, (-chance * self.shares[rank], (*path, rank)))

    def run_until(self, moment_s: float) -> None:
        while self.now_s < moment_s and self.step():
            pass
        self.now_s = max(self.now_s, moment_s)

    def advance(self, path: Path) -> None:
        """Go on under what was committed."""
        num, is_known = len(path), self.arrival_s(path) is not None
        below = {node[num:]: at for node, at in self.children_s.items() if node[:num] == path} if is_known else {}
        unfed = [node[num:] for _, node in self._unfed if node[:num] == path] if is_known else [()]
        self.children_s = below
        self._unfed = [(-self._chance(node), node) for node in unfed]
        heapq.heapify(self._unfed)
        for node in below:
            self._fill(node, self._chance(node))

    def _chance(self, path: Path) -> float:
        return math.prod(self.shares[rank] for rank in path)

    def arrival_s(self, path: Path) -> float | None:
        """Return when a node is with the target; None where it is not made."""
        children = self.children_s.get(path[:-1], ())
        return children[path[-1]] if path[-1] < len(children) else None

    def parked(self, moment_s: float, *, trees: bool) -> Iterator[tuple[float, Path]]:
        """Yield what the target might verify at a moment, the likeliest first, with its chance."""
        heap: list[tuple[float, Path]] = []

        def offer(path: Path) -> None:
            arrival_s = self.arrival_s(path)
            if arrival_s is not None and arrival_s <= moment_s:
                heapq.heappush(heap, (-self._chance(path), path))

        offer((0,))
        while heap:
            chance, path = heapq.heappop(heap)
            yield -chance, path
            offer((*path, 0))
            if trees:
                offer((*path[:-1], path[-1] + 1))

    def next_s(self, depth: int, most_s: float) -> float:
        """Return when the chain's next node is at the target, inf where that is after `most_s`; grow it until then."""
        path = (0,) * (depth + 1)
        while (arrival_s := self.arrival_s(path)) is None and self.now_s < most_s and self.step():
            pass
        return math.inf if arrival_s is None else arrival_s


def best_count(gains: Sequence[float], base_gain: float, seconds: Callable[[int], float]) -> int:
    """Return how many further rows make the most tokens a second. base_gain: tokens without them."""
    totals = list(accumulate(gains, initial=base_gain))
    return max(range(len(totals)), key=lambda count: totals[count] / seconds(count))
