"""`make fuzz ARGS='--inputs 100000 --seed 1'`: the proto handlers of all parts under inputs that nobody should send.

Ends with 1 when a part crashed, hung, kept something, or answered with a status that blames itself.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz import campaigns, services
from tests.fuzz.campaigns import Tally

SHARES = {"target": 0.35, "draft": 0.15, "deliver": 0.3, "generate": 0.1, "join": 0.1}
WARM_UP = 0.25
"""Of a campaign: caches and allocators have grown by then."""
MAX_GROWTH_MIB = 24.0

Campaign = Callable[[Any], None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="items, parts, calls and reports in all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target, draft = stack.enter_context(services.workers(folder))
        front = stack.enter_context(services.front_door())
        registry, channel = stack.enter_context(services.registry())
        tallies = {name: Tally() for name in SHARES}
        lies = [target.address, target.address, "", "127.0.0.1:1", "nowhere.invalid:9", "\0"]
        run: dict[str, Campaign] = {
            "target": campaigns.control(target, lies, tallies["target"]),
            "draft": campaigns.control(draft, lies, tallies["draft"]),
            "deliver": campaigns.deliver(target, tallies["deliver"]),
            "generate": campaigns.generate(front, tallies["generate"]),
            "join": campaigns.join(registry, channel, tallies["join"]),
        }
        grown = {"target": 0.0, "draft": 0.0}
        for name, share in SHARES.items():
            count, tally = round(args.inputs * share), tallies[name]
            campaigns.run(run[name], tally, round(WARM_UP * count), args.seed)
            before = {worker.role: worker.memory_mib() for worker in (target, draft)}
            campaigns.run(run[name], tally, count, args.seed + 1)
            for worker in (target, draft):
                worker.check_alive()
                worker.check_empty()
                grown[worker.role] += worker.memory_mib() - before[worker.role]
            _show(name, tally)
        total = sum(tally.num_inputs for tally in tallies.values())
        seconds = sum(tally.seconds for tally in tallies.values())
        print(f"{total} inputs in {seconds:.0f} s; no crash, no hang, no fault; nothing is left of them")
        print("memory after warm-up: " + ", ".join(f"{role} {mib:+.1f} MiB" for role, mib in grown.items()))
        over = [role for role, mib in grown.items() if mib > MAX_GROWTH_MIB]
        if over:
            print(f"the memory of {' and '.join(over)} grew by over {MAX_GROWTH_MIB:g} MiB", file=sys.stderr)
        return 1 if over else 0


def _show(name: str, tally: Tally) -> None:
    ends = ", ".join(f"{end} {count}" for end, count in tally.ends.most_common())
    print(f"{name}: {tally.num_inputs} inputs in {tally.seconds:.0f} s: {ends}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
