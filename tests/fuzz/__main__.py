"""`make fuzz ARGS='--inputs 100000 --seed 1'`: the proto handlers of all parts, and the gateway's HTTP endpoints, under
inputs that nobody should send.

Ends with 1 when a part crashed, hung, kept something, or answered with a status that blames itself. The table is
written to benchmarks/results.
"""

import argparse
import contextlib
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Report
from benchmarks.footprint import Held, held
from tests.fuzz import campaigns, services
from tests.fuzz.calls import DEADLINE_S
from tests.fuzz.campaigns import CLEAR, CLEAR_STATUSES, Tally

SHARES = {"target": 0.2, "draft": 0.1, "deliver": 0.25, "generate": 0.1, "bodies": 0.2, "grammars": 0.1, "join": 0.05}
METHODS = {
    "target": "TargetService/Control",
    "draft": "DraftService/Control",
    "deliver": "TargetService/Deliver",
    "generate": "GenerationService/Generate",
    "bodies": "HTTP bodies",
    "grammars": "GenerateRequest.structured_outputs",
    "join": "RegistryService/Join",
}
WARM_UP = 0.25
"""Of a campaign: caches and allocators have grown by then."""
MAX_GROWTH_MIB = 24.0
MAX_GROWTH_HERE_MIB = 256.0
"""Of this process, which holds the gateway's door, the registry and the generator of inputs."""
MORE_FILES = 4
HERE = "gateway, registry and fuzzer"

Campaign = Callable[[Any], None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="altered items, parts, calls, bodies and reports in all"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES), help="campaigns; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    report = Report("fuzz", "Messages that nobody should send")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target, draft = stack.enter_context(services.workers(folder))
        front = stack.enter_context(services.front_door())
        door = stack.enter_context(services.http_door(folder))
        check = stack.enter_context(services.grammar_checks())
        registry, channel = stack.enter_context(services.registry())
        tallies = {name: Tally() for name in SHARES}
        lies = [target.address, target.address, "", "127.0.0.1:1", "nowhere.invalid:9", "\0"]
        run: dict[str, Campaign] = {
            "target": campaigns.control(target, lies, tallies["target"]),
            "draft": campaigns.control(draft, lies, tallies["draft"]),
            "deliver": campaigns.deliver(target, tallies["deliver"]),
            "generate": campaigns.generate(front, tallies["generate"]),
            "bodies": campaigns.bodies(door, tallies["bodies"]),
            "grammars": campaigns.grammars(check, tallies["grammars"]),
            "join": campaigns.join(registry, channel, tallies["join"]),
        }
        pids = {"target": target.process.pid, "draft": draft.process.pid, HERE: os.getpid()}
        grown = dict.fromkeys(pids, 0.0)
        violations: list[str] = []
        for name in args.only:
            share = SHARES[name] / sum(SHARES[each] for each in args.only)
            count, tally = round(args.inputs * share), tallies[name]
            campaigns.run(run[name], tally, round(WARM_UP * count), args.seed)
            _let_go()
            before = {part: held(pid) for part, pid in pids.items()}
            campaigns.run(run[name], tally, count, args.seed + 1)
            for worker in (target, draft):
                worker.check_alive()
                worker.check_empty()
            _show(name, tally)
            _let_go()
            for part, pid in pids.items():
                after = _settled(pid, before[part])
                grown[part] += (after.own_bytes - before[part].own_bytes) / 2**20
                violations += _more(f"{part} after {METHODS[name]}", before[part], after)
    for part, mib in grown.items():
        if mib > (MAX_GROWTH_HERE_MIB if part == HERE else MAX_GROWTH_MIB):
            violations.append(f"{part} grew by {mib:.1f} MiB")
    _write(report, {name: tallies[name] for name in args.only}, grown, violations, args)
    return 1 if violations else 0


def _let_go() -> None:
    """Give back what this process no longer uses: what the allocator keeps after the largest input is no leak."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).malloc_trim(0)


def _settled(pid: int, before: Held) -> Held:
    """Connections of the last inputs close a moment later."""
    give_up_s = time.monotonic() + 5.0
    while (after := held(pid)).num_files > before.num_files + MORE_FILES and time.monotonic() < give_up_s:
        time.sleep(0.2)
    return after


def _more(where: str, before: Held, after: Held) -> list[str]:
    counts = {"files": (before.num_files, after.num_files), "threads": (before.num_threads, after.num_threads)}
    return [
        f"{where}: {one} open {what}, then {other}" for what, (one, other) in counts.items() if other > one + MORE_FILES
    ]


def _show(name: str, tally: Tally) -> None:
    ends = ", ".join(f"{end} {count}" for end, count in tally.ends.most_common())
    print(f"{name}: {tally.num_altered} of {tally.num_inputs} altered, in {tally.seconds:.0f} s: {ends}", flush=True)


def _write(
    report: Report, tallies: dict[str, Tally], grown: dict[str, float], violations: list[str], args: argparse.Namespace
) -> None:
    rows = [
        [
            METHODS[name],
            *(f"{count:,}" for count in (tally.num_inputs, tally.num_altered, tally.num_refused, tally.num_accepted)),
            f"{1e3 * tally.slowest_s:.0f}",
        ]
        for name, tally in tallies.items()
    ]
    totals = [sum(int(row[column].replace(",", "")) for row in rows) for column in range(1, 5)]
    rows.append(["all", *(f"{count:,}" for count in totals), ""])
    report.table("Inputs", ("method", "sent", "of these altered", "refused", "accepted", "slowest call, ms"), rows)
    report.text(
        "Altered: its bytes are not those of a valid message in its place. Refused and accepted count the inputs that "
        "are answered one by one; what comes behind bytes that are no message is not read, and some have no answer."
    )
    report.text("Memory after the warm-up: " + ", ".join(f"{part} {mib:+.1f} MiB" for part, mib in grown.items()) + ".")
    codes = ", ".join([*sorted(code.name for code in CLEAR), *map(str, sorted(CLEAR_STATUSES))])
    report.data["ends"] = {name: dict(tally.ends) for name, tally in tallies.items()}
    report.verdict(
        violations,
        f"No crash; no call took {DEADLINE_S:g} s; every one ended in one of {codes}; and after each campaign a "
        "valid request was served and no slot, block, ticket, answer, file or thread was left.",
    )
    report.write(args.results)


if __name__ == "__main__":
    sys.exit(main())
