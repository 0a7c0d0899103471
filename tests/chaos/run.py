"""Right answers first, then streams and faults together, then what is left. Exit code 1 on a violation."""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.common import RESULTS, Report
from tests.chaos.checks import leaks, not_recovered, open_streams
from tests.chaos.excuses import Outages
from tests.chaos.faults import Chaos, possible
from tests.chaos.load import REQUEST_TIMEOUT_S, STREAM_TIMEOUT_S, Gateway, Load
from tests.chaos.plan import LONGEST_S, PAUSE_BEFORE_S, SHORTEST_S, make_plan
from tests.chaos.questions import answered, questions
from tests.chaos.results import add_recovery, add_streams, add_strikes, add_verdict, quiet_waits
from tests.chaos.system import HEADS, draft_args, running_system
from tests.chaos.watching import Watcher

WARM_UP_S = 5.0
"""Of the quiet time, not measured."""


async def run(options: argparse.Namespace, report: Report, folder: Path) -> list[str]:
    """The violations."""
    faults = options.faults or possible(options.drafts, options.gateways)
    fewest, most = options.streams[0], options.streams[-1]
    plan = make_plan(
        faults, seed=options.seed, minutes=options.minutes, every_s=options.every, fewest=fewest, most=most
    )
    async with running_system(
        options.targets,
        options.gateways,
        [draft_args(kind, folder) for kind in kinds_of(options)],
        options.kv_cache_tokens,
        REQUEST_TIMEOUT_S,
        folder,
    ) as system:
        pools = system.pools
        numbers = range(options.gateways)
        gateways = [Gateway(pools.grpc(index), pools.http(index)) for index in numbers]
        asked = await answered(gateways[0].grpc, questions(options.seed, options.questions))
        print(f"{len(asked)} questions have their answers; {len(plan)} faults follow", flush=True)
        outages = Outages(options.gateways, options.targets)
        load, watcher = Load(gateways, outages, asked, options.seed, fewest), Watcher(system, outages)
        chaos = Chaos(system, outages, load, watcher)
        began_s = time.monotonic()
        streaming = asyncio.create_task(load.run())
        try:
            await chaos.run(plan)
            load.stop()
            await asyncio.wait({streaming}, timeout=STREAM_TIMEOUT_S + 30.0)
            unended = [] if streaming.done() else [f"{load.num_running} streams never ended"]
            if streaming.done():
                streaming.result()
        finally:
            streaming.cancel()
            await load.close()
        quiet = quiet_waits(load.streams, began_s + WARM_UP_S, began_s + PAUSE_BEFORE_S - 1.0)
        violations = [*load.violations, *unended, *(each for strike in chaos.strikes for each in strike.violations)]
        violations += await not_recovered(system, watcher, asked)
        await watcher.close()
        violations += await asyncio.to_thread(leaks, system)
        violations += await asyncio.to_thread(open_streams, system)
    add_recovery(report, load, chaos.strikes, quiet)
    add_strikes(report, chaos.strikes)
    add_streams(report, load)
    add_verdict(report, violations, chaos.strikes)
    return violations


def kinds_of(options: argparse.Namespace) -> list[str]:
    """Return what each draft is."""
    return [options.draft[index % len(options.draft)] for index in range(options.drafts)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64], help="fewest and most at once")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults, about")
    parser.add_argument("--seed", type=int, default=1, help="the same seed: the same streams and faults")
    parser.add_argument("--questions", type=int, default=64, help="different ones")
    parser.add_argument("--faults", nargs="+", choices=possible(1, 2), help="these alone", metavar="FAULT")
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument(
        "--draft",
        nargs="+",
        choices=("model", *HEADS),
        default=["model", "eagle3"],
        help="what the drafts are, in turn",
    )
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--kv-cache-tokens", type=int, default=16384, help="of each worker; fewer preempt more")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--logs", type=Path, help="folder for the parts' logs; a temporary one otherwise")
    options = parser.parse_args()
    kinds = ", ".join(kinds_of(options))
    report = Report("chaos", "Streams while parts die, hang, lie and are cut off")
    report.text(
        f"{options.targets} demo targets, {options.drafts} drafts ({kinds}), each a pool, and {options.gateways} "
        "gateways as processes of one machine, with --batch-invariant and a KV cache of "
        f"{options.kv_cache_tokens} tokens a worker; {options.streams[0]} to {options.streams[-1]} streams at once, a "
        f"fault about every {options.every:g} s, seed {options.seed}. A killed process is started again up to 5 s "
        f"later; a hang, a cut, a full disk, a slow or lying draft lasts {SHORTEST_S:g} to {LONGEST_S:g} s. "
        "Right answers: those of the same system, plain, before the first fault."
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        violations = asyncio.run(run(options, report, folder))
    report.write(options.results)
    return 1 if violations else 0
