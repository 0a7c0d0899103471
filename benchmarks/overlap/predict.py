"""What a measured group's overlapped arms would make with other costs or another way to grow: to try before building.

    python -m benchmarks.overlap.predict GROUP.json --least-chance 0.01 0.003 --draft-ms 0.5

A step's extra time in a service is what the group measured where no option says it; gateway and links are the group's.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

from benchmarks.overlap import simulation
from benchmarks.overlap.costs import Costs
from benchmarks.overlap.expected import draft_service_s, service_costs, target_service_s
from benchmarks.overlap.growing import Bounds
from benchmarks.overlap.results import CHAIN, OVERLAP_TREE, OVERLAPPED, Cell, GroupResult, read
from benchmarks.overlap.traces import Traces, traces


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", type=Path, help="a group's file, with the traces beside it")
    parser.add_argument("--least-chance", type=float, nargs="+", default=[Bounds.least_chance])
    parser.add_argument("--most-offers", type=int, nargs="+", default=[Bounds.most_offers])
    parser.add_argument("--most-fed", type=int, nargs="+", default=[Bounds.max_fed])
    parser.add_argument("--draft-ms", type=float, help="extra of the draft's step in its service")
    parser.add_argument("--target-ms", type=float, help="the same of the target's step")
    return parser.parse_args()


def costs_of(result: GroupResult, cell: Cell, options: argparse.Namespace) -> Costs:
    draft_s = draft_service_s(result, cell) if options.draft_ms is None else options.draft_ms / 1e3
    target_s = target_service_s(result, cell) if options.target_ms is None else options.target_ms / 1e3
    assert cell.round_trip is not None, "an overlapped arm has a network"
    link_s = result.round_trips_s[cell.round_trip]
    return replace(service_costs(result), draft_service_s=draft_s, target_service_s=target_s, round_trip_s=link_s)


def predict(result: GroupResult, found: Traces, options: argparse.Namespace) -> None:
    base = simulation.chain(found, result.costs, simulation.best_length(found, result.costs, services=False))
    print(f"{result.group.name}: {CHAIN} {base.tokens_per_s:.1f} tok/s")
    cells = [cell for cell in result.cells() if cell.arm in OVERLAPPED]
    for least, offers, fed in itertools.product(options.least_chance, options.most_offers, options.most_fed):
        bounds = Bounds(least_chance=least, most_offers=offers, max_fed=fed)
        print(f"least chance {least:g}, {offers} offers, {fed} fed")
        for cell in cells:
            said = simulation.overlap(
                found, costs_of(result, cell, options), trees=cell.arm == OVERLAP_TREE, bounds=bounds
            )
            print(
                f"  {cell.arm}, {cell.round_trip:g}: {said.tokens_per_s:.1f} tok/s, "
                f"{said.tokens_per_s / base.tokens_per_s:.2f} of the chain (measured {cell.tokens_per_s:.1f} tok/s); "
                f"hits {said.num_hits / said.num_steps:.2f}, {said.num_tokens / said.num_steps:.2f} tokens a step, "
                f"idle target {said.target_idle:.2f}, draft {said.draft_idle:.2f}"
            )


if __name__ == "__main__":
    given = options_of()
    measured = read(given.group)
    predict(measured, traces(measured.group, (), 0, given.group.parent), given)
