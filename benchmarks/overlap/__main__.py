"""Compare the overlapped round with the same two models in one process and with the round before it.

    make bench-overlap                                # or: python -m benchmarks.overlap --help
    make bench-overlap BASE=COMMIT ARGS='--groups 0.1-greedy-0 0.1-coupled-1'

A group is one size of the draft and one rule; it is measured with all its arms in turn, and its results lie in a file
of its own from then on: what was interrupted goes on with the next group. The target, the demo target widened, has the
second core, draft and gateway have the first; on each of the three links between them a relay delays every byte. The
processes of other arms stay and sleep; what they do meanwhile is 2 % of the second core and 5 % of the first. The table
has all groups that have a file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import selectors
import sys
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.common import DEMO_TARGET, HELD_OUT, Report, of_all_kinds, parser, read_prompts
from benchmarks.overlap.checkouts import checkout_of, this_checkout
from benchmarks.overlap.groups import GREEDY, ROUND_TRIPS, Group, all_groups, seed_of
from benchmarks.overlap.measuring import measure
from benchmarks.overlap.results import GroupResult, read, save
from benchmarks.overlap.table import FAR_OFF, MARK, add_group, add_summary
from benchmarks.overlap.traces import Traces, traces

SIZE = "94M"
BASE = "b67880c"
"""The commit before the round was rebuilt."""


def name_of(options: argparse.Namespace) -> str:
    """Return the name of the report, and of the folder with a file for each group and the traces that the simulation
    runs on: what is measured otherwise lies elsewhere.
    """
    size = "" if options.size == SIZE else f"-{options.size}"
    return f"overlap{size}{'-apart' if options.apart else ''}"


def options_of() -> argparse.Namespace:
    names = [group.name for group in all_groups()]
    made = parser(
        __doc__,
        size=SIZE,
        prompts=8,
        prompt_tokens=48,
        max_tokens=64,
        repetitions=5,
        tune_prompts=3,
        round_trips=list(ROUND_TRIPS),
    )
    made.add_argument("--groups", nargs="+", default=names, choices=names, help="to measure; all by default")
    made.add_argument("--base", default=os.environ.get("BASE") or BASE, help="commit of the round before; or BASE")
    made.add_argument("--bandwidth", type=float, help="bytes a second of each link behind a relay; absent = unlimited")
    made.add_argument("--apart", action="store_true", help="the overlapped draft sleeps for most of a step")
    made.add_argument("--most-minutes", type=float, default=38.0, help="after which a group begins no repetition more")
    made.add_argument("--table", action="store_true", help="write the table of what was measured, and measure nothing")
    return made.parse_args()


def tokenized(count: int, num_tokens: int) -> list[list[int]]:
    """Return held-out prompts, the ends of the longer ones."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    return [tokenizer.encode(each.text).ids[-num_tokens:] for each in of_all_kinds(read_prompts(HELD_OUT), count)]


def measure_group(group: Group, options: argparse.Namespace) -> GroupResult:
    """Measure one group in an event loop whose sleeps end on time: epoll's are cut to whole milliseconds."""
    here, base = this_checkout(), checkout_of(options.base)
    for checkout in (here, base):
        checkout.check()
    prompts, traced = tokenized(options.prompts, options.prompt_tokens), traces_of(group, options)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(measure(group, prompts, traced, options, here, base))


def main() -> int:
    options = options_of()
    folder: Path = options.results / name_of(options)
    groups = [group for group in all_groups() if group.name in options.groups]
    for group in () if options.table else groups:
        path = folder / f"{group.name}.json"
        if path.exists():
            print(f"{group.name} is measured already: {path}", flush=True)
            continue
        print(f"measuring {group.name}", flush=True)
        save(measure_group(group, options), path)
    found = [read(path) for group in all_groups() if (path := folder / f"{group.name}.json").exists()]
    if not found:
        sys.exit(f"nothing is measured yet in {folder}")
    return write_report(found, options)


def traces_of(group: Group, options: argparse.Namespace) -> Traces:
    """Return traces along the texts that are measured."""
    prompts = tokenized(options.prompts, options.prompt_tokens)
    repetitions = range(1 if group.rule == GREEDY else options.repetitions)
    tasks = [(prompt, seed_of(each, index)) for each in repetitions for index, prompt in enumerate(prompts)]
    return traces(group, tasks, options.max_tokens, options.results / name_of(options))


def write_report(found: list[GroupResult], options: argparse.Namespace) -> int:
    report = Report(name_of(options), "Overlapped rounds beside the same models in one process")
    if options.apart:
        report.text(
            "THE OVERLAPPED DRAFT'S STEPS ARE SLEPT: it is the demo draft as it is, its steps take what those of the "
            "widened one take alone, and slow down no step of the target: a draft on hardware of its own."
        )
    report.text(
        f"The demo pair, its target WIDENED to {options.size}, its draft widened as said, float32; {options.prompts} "
        f"held-out prompts of {options.prompt_tokens} tokens or less, one answer at a time. Speeds are of the tokens "
        "after an answer's first verdict. Draft and gateway share a core, the target has one; a pair in one process "
        "has the target's, or where that is said both. A ratio is that of two answers to one prompt in one repetition, "
        "in brackets the interval of 95 % from a bootstrap over prompts. Idle shares are of whole answers, prompts "
        f"included. {MARK} more than {100 * FAR_OFF:.0f} % off the simulation."
    )
    missed = [each for result in found for each in add_group(report, result, traces_of(result.group, options))]
    add_summary(report, found)
    report.verdict(missed, "No goal is missed.")
    report.write(options.results)
    return 1 if missed else 0


if __name__ == "__main__":
    os.sched_setaffinity(0, {0})
    sys.exit(main())
