"""Measure what the host costs: CPU time a token of gateway, target and draft beside their models' forwards.

    make bench-host                                   # or: python -m benchmarks.host --quick
    python -m benchmarks.host --against ../earlier    # the same cells on another checkout, in turn, and their ratios

Both models are of one small layer with random weights, so nearly all that is left is the host's own work. Every cell
(plain, K = 4 and auto; greedy, T = 1 and coupled; 1, 16 and 64 answers at once; streamed and whole) takes its turn in
each repetition; vLLM's build for CPUs, where `make peers ARGS=vllm` has installed it, in six of them. Ten minutes on a
machine that does nothing else, twenty with --against, which leaves vLLM out.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import REPO, WORK, Report, parser
from benchmarks.host import tools
from benchmarks.host.cells import CELLS, NUM_AT_ONCE, Cell, Pass, run_pass
from benchmarks.host.models import DTYPE
from benchmarks.host.systems import VLLM_PYTHON, System, commit_of, outrider, vllm
from benchmarks.host.tables import add_cells, add_ratios, add_steps, add_vllm
from benchmarks.processes import checkout_at
from benchmarks.runner import in_turn

OURS, OTHER, VLLM = "this checkout", "the other checkout", "vLLM"
QUICK_TOKENS = 32
Found = dict[str, dict[Cell, list[Pass]]]
"""Passes by system and cell."""


def systems_of(cell: Cell, systems: Sequence[System], repetition: int) -> Sequence[System]:
    """Return the systems that run the cell, in another order each repetition."""
    able = [system for system in systems if system.name != VLLM or cell.has_peer]
    return in_turn(able, repetition)


def measure(systems: Sequence[System], options: argparse.Namespace) -> Found:
    """Run every cell on every system, in turn, as often as the options say."""
    found: Found = {system.name: {} for system in systems}
    for system in systems:
        for cell in (CELLS[0], CELLS[-1]):  # the first answers of a process cost more
            run_pass(system, cell, QUICK_TOKENS)
    for repetition in range(options.repetitions):
        for cell in CELLS:
            for system in systems_of(cell, systems, repetition):
                made = run_pass(system, cell, options.max_tokens)
                found[system.name].setdefault(cell, []).append(made)
                print(
                    f"{repetition}: {cell}, {system.name}: {made.tokens_per_s:.0f} tok/s, {made.cpu_us:.0f} us",
                    flush=True,
                )
    return found


def started_systems(stack: contextlib.ExitStack, report: Report, options: argparse.Namespace) -> list[System]:
    """Start what is to be measured, and say in the report what is not."""
    systems = [stack.enter_context(outrider(OURS, checkout_at(REPO)))]
    if options.against is not None:
        systems.append(stack.enter_context(outrider(OTHER, checkout_at(options.against))))
        report.text(f"The other checkout is at {commit_of(options.against)}.")
    if options.against is not None or options.quick or options.no_vllm:
        return systems
    if not VLLM_PYTHON.exists():
        report.text("vLLM is not installed (make peers ARGS=vllm), so it is not measured.")
    else:
        try:
            systems.append(stack.enter_context(vllm()))
        except RuntimeError as error:
            report.text(f"{error}, so it is not measured.")
    return systems


def main() -> int:
    made = parser(__doc__, repetitions=6, max_tokens=128)
    made.add_argument("--against", type=Path, help="another checkout of Outrider, in vLLM's place")
    made.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    made.add_argument("--quick", action="store_true", help="once, with short answers, into .work/quick: for trying")
    made.add_argument("--tools", action="store_true", help="what tool calls cost the gateway, instead")
    options = made.parse_args()
    if options.quick:
        options.repetitions, options.max_tokens, options.results = 1, QUICK_TOKENS, WORK / "quick"
    if options.tools:
        report = Report("host-tools", "What tool calls cost the gateway")
        tools.measure(report, options.repetitions)
        report.write(options.results)
        return 1 if report.data["violations"] else 0
    report = Report("host" if options.against is None else "host-against", "What the host costs")
    report.text(
        f"A target and a draft of one small layer with random weights, {DTYPE}; answers of {options.max_tokens} "
        f"tokens, {', '.join(map(str, NUM_AT_ONCE))} at once; {options.repetitions} repetitions. The target has one "
        "core, draft and gateway share another, and the client runs on both."
    )
    with contextlib.ExitStack() as stack:
        found = measure(started_systems(stack, report, options), options)
    add_cells(report, found[OURS])
    add_steps(report, found[OURS])
    if VLLM in found:
        add_vllm(report, found[OURS], found[VLLM])
    if OTHER in found:
        violations = add_ratios(report, found[OURS], found[OTHER])
        if not options.quick:  # one pair has no interval
            report.verdict(violations)
    report.write(options.results)
    return 1 if report.data.get("violations") else 0


if __name__ == "__main__":
    sys.exit(main())
