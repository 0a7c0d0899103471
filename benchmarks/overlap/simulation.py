"""What each arm should make, from traces of the pair and measured costs: one answer, one draft, one target.

A round is replayed along the traces. Its time is that of the steps it has, and of the links between them; what the
processes lose beside that is measured and handed in. Left out: prompts, ends of answers, what else the machine does.

The overlapped round follows the product: the draft feeds the likeliest nodes of a tree and pushes their children; the
target steps by itself, with the rows that make the most tokens a second of those that have arrived, and waits only
while the next guess is worth more than the wait. The draft hears of a commit through the gateway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.overlap.costs import Costs
from benchmarks.overlap.growing import Bounds, Growing, best_count
from benchmarks.overlap.shapes import Path, Shape
from benchmarks.overlap.traces import MAX_CHAIN, Traces


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


def overlap(traces: Traces, costs: Costs, *, trees: bool, bounds: Bounds | None = None) -> Estimate:
    """The target steps by itself and takes what has come. trees: of the tree, else of its likeliest chain alone.
    bounds: None for the product's own.
    """
    found, bounds = Estimate(), bounds or Bounds()
    shares = [max(1e-4, float(share)) for share in traces.shares]
    learn_s = costs.round_trip_s + costs.gateway_s  # from a commit until the draft knows
    for text in range(traces.kept.shape[0]):
        position, free_s, rate = 0, 0.0, 1.5 / costs.verify_s(1)
        growing = Growing(shares, costs, bounds)
        while position < traces.num_positions:
            begin_s = _held_until(growing, free_s, shares[0], rate)
            found.hold_s += begin_s - free_s
            most = min(MAX_CHAIN + 4 * trees, traces.num_positions - position)
            parked = [each for each, _ in zip(growing.parked(begin_s, trees=trees), range(most), strict=False)]
            gains = [chance for chance, _ in parked]
            count = best_count(gains, 1.0, lambda num: costs.verify_s(num + 1))
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


def best_length(traces: Traces, costs: Costs, *, services: bool) -> int:
    """Return the K with which draft and target taking turns are fastest."""
    return max(range(MAX_CHAIN + 1), key=lambda k: chain(traces, costs, k, services=services).tokens_per_s)
