"""What each arm should make, from traces of the pair and measured costs: one answer, one draft, one target.

A round is replayed along the traces. Its time is that of the steps it has, and of the links between them; what the
processes lose beside that is measured and handed in. Left out: prompts, ends of answers, what else the machine does.

The overlapped round follows the product: the draft feeds the likeliest nodes of a tree and pushes their children; the
target steps by itself, with the rows that make the most tokens a second of those that have arrived, and waits only
while the next guess is worth more than the wait. The draft hears of a commit through the gateway.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.overlap.shapes import Path, Shape
from benchmarks.overlap.traces import MAX_CHAIN, Traces
from draft_service.grower import MOST_OFFERS, NUM_URGENT, PUSH_S
from draft_service.tree import LEAST_CHANCE, MAX_DEPTH, MAX_FED
from outrider.engine.speculation.ranks import MAX_RANKS


@dataclass(frozen=True)
class Costs:
    """Measured seconds."""

    verify: Mapping[int, float]
    """A forward of the target by rows."""
    draft: Mapping[int, float]
    """A forward of the draft by rows."""
    decide_s: float = 0.0
    """From logits to what is kept."""
    draw_s: float = 0.0
    """From the logits after one node to what follows it."""
    gateway_s: float = 0.0
    """A turn through the gateway and its streams, without the links."""
    target_service_s: float = 0.0
    draft_service_s: float = 0.0
    """What a step takes more in a service than in a bare process."""
    round_trip_s: float = 0.0
    """Of any link."""

    def verify_s(self, num_rows: int) -> float:
        return _at(self.verify, num_rows) + self.decide_s

    def draft_s(self, num_rows: int) -> float:
        return _at(self.draft, num_rows) + num_rows * self.draw_s


def _at(seconds: Mapping[int, float], num_rows: int) -> float:
    """Return the seconds of the least measured number of rows that is as large; of the largest beyond."""
    return seconds[min((each for each in seconds if each >= num_rows), default=max(seconds))]


@dataclass
class Estimate:
    """What an arm is expected to do."""

    num_tokens: int = 0
    num_steps: int = 0
    num_hits: int = 0
    """Steps for which guesses lay ready when the one before ended."""
    seconds: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    hold_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def target_idle(self) -> float:
        return 1.0 - self.verify_s / self.seconds

    @property
    def draft_idle(self) -> float:
        return max(0.0, 1.0 - self.draft_s / self.seconds)

    def note(self, num_tokens: int, verify_s: float) -> None:
        self.num_tokens += num_tokens
        self.num_steps += 1
        self.verify_s += verify_s


# rounds of draft and target in turn


def chain(traces: Traces, costs: Costs, length: int, *, services: bool = False) -> Estimate:
    """Draft and target take turns over chains, in one process or, with `services`, as before the rebuilt round: Propose
    and Delivery, Verdict and Propose make one and a half round trips.
    """
    draft_s, verify_s, between_s = length * costs.draft_s(1), costs.verify_s(length + 1), 0.0
    if services:
        draft_s += length * costs.draft_service_s
        verify_s += costs.target_service_s
        between_s = costs.gateway_s + (1.5 if length else 1.0) * costs.round_trip_s
    found = Estimate()
    for text in range(traces.kept.shape[0]):
        position = 0
        while position < traces.num_positions:
            num_tokens = int(traces.kept[text, position, length]) + 1
            found.note(num_tokens, verify_s)
            position += num_tokens
    found.draft_s = found.num_steps * draft_s
    found.seconds = found.num_steps * (draft_s + verify_s + between_s)
    return found


def tree(traces: Traces, costs: Costs, shape: Shape) -> Estimate:
    """Draft and target take turns over trees of one shape, in one process. Greedy and coupled alone."""
    draft_s = sum(costs.draft_s(len(level)) for level in shape.levels)
    verify_s, nodes = costs.verify_s(len(shape.paths) + 1), set(shape.paths)
    found = Estimate()
    for text in range(traces.kept.shape[0]):
        position = 0
        while position < traces.num_positions:
            num_tokens = len(_walk(traces, text, position, nodes)) + 1
            found.note(num_tokens, verify_s)
            position += num_tokens
    found.draft_s = found.num_steps * draft_s
    found.seconds = found.num_steps * (draft_s + verify_s)
    return found


def _walk(traces: Traces, text: int, position: int, nodes: set[Path]) -> Path:
    """Return the deepest node that the text goes through."""
    path: Path = ()
    while position + len(path) < traces.num_positions:
        further = (*path, int(traces.guess[text, position + len(path), 0]))
        if further not in nodes:
            break
        path = further
    return path


# the overlapped round


@dataclass
class Growing:
    """The draft's tree under what is committed, and when what it made is with the target."""

    shares: Sequence[float]
    costs: Costs
    now_s: float = 0.0
    """When the draft is through with its last step."""
    draft_s: float = 0.0
    children_s: dict[Path, list[float]] = field(default_factory=dict)
    """By node that was fed, when each of its children is with the target; inf while it is not sent."""
    _unfed: list[tuple[float, Path]] = field(default_factory=lambda: [(-1.0, ())])
    _pushed_s: float = 0.0
    _num_urgent: int = NUM_URGENT

    def step(self) -> bool:
        """Feed the nodes that make the most of the draft's time; return whether there were any."""
        offers = self._offers()
        if not offers:
            return False
        count = _best_count([-each for each, _ in offers], 0.0, lambda num: self._step_s(num) if num else math.inf)
        for offer in offers[count:]:
            heapq.heappush(self._unfed, offer)
        took_s = self._step_s(count)
        self.now_s += took_s
        self.draft_s += took_s
        for chance, path in offers[:count]:
            self.children_s[path] = []
            self._fill(path, -chance)
        self._push()
        return True

    def _step_s(self, num_rows: int) -> float:
        return self.costs.draft_s(num_rows) + self.costs.draft_service_s

    @property
    def _is_done(self) -> bool:
        """Whether nothing is worth a step."""
        return not self._unfed or -self._unfed[0][0] * self.shares[0] < LEAST_CHANCE

    def _offers(self) -> list[tuple[float, Path]]:
        found = list[tuple[float, Path]]()
        while len(found) < min(MOST_OFFERS, MAX_FED - len(self.children_s)) and not self._is_done:
            offer = heapq.heappop(self._unfed)
            if len(offer[1]) < MAX_DEPTH:
                found.append(offer)
        return found

    def _fill(self, path: Path, chance: float) -> None:
        """Make the children that are wanted of a node that was fed."""
        children = self.children_s[path]
        num_likely = sum(chance * share >= LEAST_CHANCE for share in self.shares[:MAX_RANKS])
        for rank in range(len(children), max(1, num_likely)):
            children.append(math.inf)
            heapq.heappush(self._unfed, (-chance * self.shares[rank], (*path, rank)))

    def _push(self) -> None:
        if self._num_urgent or self._is_done or self.now_s - self._pushed_s >= PUSH_S:
            self._pushed_s, self._num_urgent = self.now_s, max(0, self._num_urgent - 1)
            arrival_s = self.now_s + self.costs.round_trip_s / 2
            for children in self.children_s.values():
                children[:] = [min(each, arrival_s) for each in children]

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
        if () not in below:
            self._num_urgent = NUM_URGENT

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
        while (self.arrival_s(path) or math.inf) == math.inf and self.now_s < most_s and self.step():
            pass
        return self.arrival_s(path) or math.inf


def overlap(traces: Traces, costs: Costs, *, trees: bool) -> Estimate:
    """The target steps by itself and takes what has come. trees: of the tree, else of its likeliest chain alone."""
    found = Estimate()
    shares = [max(1e-4, float(share)) for share in traces.shares]
    learn_s = costs.round_trip_s + costs.gateway_s  # from a commit until the draft knows
    for text in range(traces.kept.shape[0]):
        position, free_s, rate = 0, 0.0, 1.5 / costs.verify_s(1)
        growing = Growing(shares, costs)
        while position < traces.num_positions:
            begin_s = _held_until(growing, free_s, shares[0], rate)
            found.hold_s += begin_s - free_s
            most = min(MAX_CHAIN + 4 * trees, traces.num_positions - position)
            parked = [each for each, _ in zip(growing.parked(begin_s, trees=trees), range(most), strict=False)]
            gains = [chance for chance, _ in parked]
            count = _best_count(gains, 1.0, lambda num: costs.verify_s(num + 1))
            step_s = costs.verify_s(count + 1) + costs.target_service_s
            path = _committed(traces, text, position, [node for _, node in parked[:count]], trees)
            found.note(len(path), step_s)
            position += len(path)
            free_s = begin_s + step_s
            rate += 0.25 * (len(path) / step_s - rate)
            growing.run_until(free_s)
            found.num_hits += any(at <= free_s for at in growing.children_s.get(path, ()))
            growing.run_until(free_s + learn_s)
            growing.advance(path)
        found.seconds += free_s
        found.draft_s += growing.draft_s
    return found


def _held_until(growing: Growing, free_s: float, share: float, rate: float) -> float:
    """Return when the target begins: it waits for the next guess while that is worth more than the wait."""
    begin_s = free_s
    while True:
        depth = sum(path == (0,) * len(path) for _, path in growing.parked(begin_s, trees=False))
        worth_s = share ** (depth + 1) / rate
        next_s = growing.next_s(depth, begin_s + worth_s) if depth < MAX_CHAIN else math.inf
        if next_s - begin_s >= worth_s:
            return begin_s
        begin_s = next_s


def _committed(traces: Traces, text: int, position: int, nodes: Sequence[Path], trees: bool) -> Path:
    """Return the guesses that a step commits: those kept, and the one that the target's own token is."""
    if trees:
        kept = _walk(traces, text, position, set(nodes))
        place = min(position + len(kept), traces.num_positions - 1)
        return (*kept, int(traces.guess[text, place, 0]))
    length = len(nodes)
    return (0,) * int(traces.kept[text, position, length]) + (int(traces.guess[text, position, length]),)


def _best_count(gains: Sequence[float], base_gain: float, seconds: Callable[[int], float]) -> int:
    """Return how many further rows make the most tokens a second. base_gain: tokens without them."""
    totals = list(accumulate(gains, initial=base_gain))
    return max(range(len(totals)), key=lambda count: totals[count] / seconds(count))


def best_length(traces: Traces, costs: Costs, *, services: bool) -> int:
    """Return the K with which draft and target taking turns are fastest."""
    return max(range(MAX_CHAIN + 1), key=lambda k: chain(traces, costs, k, services=services).tokens_per_s)
