"""`make hostile ARGS='--requests 2000 --seed 1'`: requests that mean harm, beside a caller who wants an answer.

The demo pair runs as plain processes behind a gateway with two API keys. First, one request of each kind is sent alone:
how soon is it answered, and does anything run on once its client has left? Then three rounds of the same number of
requests a second: cheap valid ones, and twice those of `tests.hostile.requests`, half of which are valid. A victim with
the other key streams all the while, and /healthz is probed. All share the machine's cores.

Ends with 1 when a promise below was broken. The result is written to benchmarks/results.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, RESULTS, Report
from benchmarks.running import running
from outrider.lab.load.figures import quantile
from outrider.wire.processes.descendants import descendants
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from tests.hostile import requests
from tests.hostile.clients import LEFT, NO_ANSWER, Observed, Outcome, client_of, observed, send, send_all
from tests.hostile.gateway import LOG, LongRun
from tests.hostile.processes import forget_peak, idle_after_s, memory_bytes, peak_bytes
from tests.hostile.requests import HostileRequest

DEADLINE_S = 1.0
"""What a request may ask to be computed, the gateway's default."""
MAX_ANSWER_S = 3 * DEADLINE_S
"""Wall seconds within which a hostile request is answered where nothing else runs, waiting and tokenising included."""
MAX_JOB_S = 1.2 * DEADLINE_S
"""CPU seconds of one job of a thread: the deadline, and the look at it."""
MAX_AFTERWARDS_S = 2 * DEADLINE_S
"""Seconds after the last client has left within which the gateway has nothing more to do."""
MAX_CALLBACK_S = 0.05
"""CPU seconds of one callback of the gateway's event loop."""
MAX_RATIO = 2.0
"""Of /healthz' p99 and of the victim's median time between tokens, over those beside cheap requests."""
MAX_GROWTH = 1.1
"""Memory after the second hostile round over that after the first."""
MAX_MORE_MIB = 256.0
"""Memory that one request may take: a body of the largest size, what is read of it, and a checker's bound."""
IDLE_CORES = 0.15
"""Cores that a gateway with one stream or none uses at most."""
GIVE_UP_S = 8.0
"""After which a gateway that still computes for a request that was sent alone is replaced."""
ALONE_PATIENCE_S = 5.0
VICTIM, ATTACKER = "victim", "attacker"
"""API keys, and their names."""
GOOD = {200, 400, 404, 413, 415, 422, 429, LEFT}
"""Statuses that do not blame the gateway."""
NAMES = {LEFT: "left", NO_ANSWER: "no answer"}
MODULE = "tests.hostile.gateway"
MIB = 2**20


@dataclass(frozen=True)
class System:
    """A running gateway."""

    url: str
    pid: int
    log: Path

    def long_runs(self) -> list[LongRun]:
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [LongRun(**json.loads(line)) for line in lines]

    @property
    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}/smaps_rollup").exists()


@contextlib.contextmanager
def system() -> Iterator[System]:
    """Run the demo pair and the gateway, with a chat template that a request can make costly."""
    cores = sorted(os.sched_getaffinity(0))
    cache = {"kv_cache_tokens": 65_536}
    target = {"model": str(DEMO_TARGET), "cpu_cores": str(cores[-1]), **cache}
    draft = {"model": str(DEMO_DRAFT), "cpu_cores": str(cores[0]), **cache}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_keys(folder / "keys.yaml", tuple(ApiKey(name=key, sha256=digest_of(key)) for key in (VICTIM, ATTACKER)))
        own_template = (DEMO_TARGET / "chat_template.jinja").read_text(encoding="utf-8")
        (folder / "template.jinja").write_text(requests.CHAT_TEMPLATE + own_template, encoding="utf-8")
        (folder / "long_runs").touch()
        os.environ[LOG] = str(folder / "long_runs")
        gateway = {"api_keys": str(folder / "keys.yaml"), "chat_template": str(folder / "template.jinja")}
        with running(target, draft, gateway, gateway_module=MODULE) as endpoints:
            yield System(f"http://{endpoints.http}", _gateway_pid(), folder / "long_runs")


def _gateway_pid() -> int:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if MODULE in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"):
                return pid
    raise RuntimeError("no gateway runs")


@dataclass(frozen=True)
class Alone:
    """What became of a request that was sent alone."""

    outcome: Outcome
    cpu_afterwards_s: float
    """Seconds for which the gateway computed on once the client had its answer or had left."""
    max_callback_s: float
    more_mib: float
    """Peak of the gateway's memory over what it held before, in MiB."""

    def faults(self) -> list[str]:
        request, status = self.outcome.request, self.outcome.status
        found = []
        if status not in GOOD:
            found.append(f"was answered with {NAMES.get(status, status)}: {self.outcome.text[:100]}")
        if request.is_valid and status != 200:
            found.append(f"is valid, and was answered with {NAMES.get(status, status)}: {self.outcome.text[:100]}")
        if not request.is_valid and self.outcome.taken_s > MAX_ANSWER_S:
            found.append(f"was not answered within {MAX_ANSWER_S:g} s")
        if self.cpu_afterwards_s > MAX_AFTERWARDS_S:
            found.append(f"kept the gateway busy for {self.cpu_afterwards_s:.1f} s after its client had left")
        if self.more_mib > MAX_MORE_MIB:
            found.append(f"took {self.more_mib:.0f} MiB")
        if self.max_callback_s > MAX_CALLBACK_S:
            found.append(f"held the event loop for {1e3 * self.max_callback_s:.0f} ms of CPU")
        return found


def send_alone(pending: list[HostileRequest]) -> list[Alone]:
    """Send one after the other. A gateway that does not become idle again is replaced."""
    found: list[Alone] = []
    while pending:
        with system() as running_system:
            asyncio.run(send_all(running_system.url, ATTACKER, list(requests.cheap_requests(20, 0)), 20.0))  # warm
            while pending:
                request = pending.pop(0)
                found.append(_send_one(running_system, request))
                if found[-1].cpu_afterwards_s >= GIVE_UP_S or not running_system.is_alive:
                    break
    return found


def _send_one(running_system: System, request: HostileRequest) -> Alone:
    pid = running_system.pid
    forget_peak(pid)
    before_bytes, began_s = peak_bytes(pid), time.monotonic()

    async def ask() -> Outcome:
        async with client_of(running_system.url, ATTACKER) as client:
            return await send(client, dataclasses.replace(request, patience_s=ALONE_PATIENCE_S))

    outcome = asyncio.run(ask())
    afterwards_s = idle_after_s(pid, IDLE_CORES, GIVE_UP_S)
    callbacks = [run.cpu_s for run in running_system.long_runs() if run.kind == "callback" and run.at_s >= began_s]
    more_mib = (peak_bytes(pid) - before_bytes) / MIB
    one = Alone(outcome, afterwards_s, max(callbacks, default=0.0), more_mib)
    faults = "; ".join(one.faults())
    status = NAMES.get(outcome.status, outcome.status)
    print(f"{request.kind} {request.path}: {status} in {outcome.taken_s:.2f} s {faults}", flush=True)
    return one


@dataclass(frozen=True)
class Round:
    """What one round of requests did."""

    name: str
    outcomes: list[Outcome]
    seen: Observed
    idle_after_s: float
    """Seconds from the end of the last client to an idle gateway."""
    memory_bytes: int
    long_runs: list[LongRun]

    @property
    def p99_probe_s(self) -> float:
        return quantile(self.seen.probes_s, 0.99)

    @property
    def median_gap_s(self) -> float:
        return quantile(self.seen.gaps_s, 0.5)

    @property
    def median_first_s(self) -> float:
        return quantile(self.seen.first_s, 0.5)


def run_round(running_system: System, name: str, sent: Sequence[HostileRequest], rate: float) -> Round:
    num_before = len(running_system.long_runs())
    with observed(running_system.url, VICTIM) as seen:
        outcomes = asyncio.run(send_all(running_system.url, ATTACKER, sent, rate))
    idle_s = idle_after_s(running_system.pid, IDLE_CORES, 60.0)
    memory = memory_bytes(running_system.pid) if running_system.is_alive else 0
    found = Round(name, outcomes, seen, idle_s, memory, running_system.long_runs()[num_before:])
    statuses = Counter(NAMES.get(each.status, each.status) for each in outcomes)
    print(
        f"{name}: {dict(statuses)}, /healthz p99 {1e3 * found.p99_probe_s:.0f} ms, between tokens "
        f"{1e3 * found.median_gap_s:.1f} ms, idle after {idle_s:.1f} s, {memory / MIB:.0f} MiB",
        flush=True,
    )
    return found


def faults_of(each: Round) -> list[str]:
    """Return what no round may show."""
    found = [f"{each.name}: {count} times {fault}" for fault, count in Counter(each.seen.faults).most_common(5)]
    bad = Counter(one.status for one in each.outcomes if one.status not in GOOD)
    for status, count in bad.most_common():
        kinds = Counter(one.request.kind for one in each.outcomes if one.status == status)
        first = ", ".join(kind for kind, _ in kinds.most_common(4))
        text = next(one.text for one in each.outcomes if one.status == status)[:100]
        found.append(f"{each.name}: {count} were answered with {NAMES.get(status, status)} ({first}, ...): {text}")
    for kind, limit_s in (("callback", MAX_CALLBACK_S), ("job", MAX_JOB_S)):
        long = [run for run in each.long_runs if run.kind == kind and run.cpu_s > limit_s and not run.stack]
        if long:
            longest = max(long, key=lambda run: run.cpu_s)
            found.append(
                f"{each.name}: {len(long)} {kind}s over {limit_s:g} s of CPU, {longest.name} {longest.cpu_s:.2f} s"
            )
    if not each.memory_bytes:
        found.append(f"{each.name}: the gateway has ended")
    if each.idle_after_s > MAX_AFTERWARDS_S:
        found.append(f"{each.name}: the gateway was busy for {each.idle_after_s:.1f} s after the last client had left")
    return found


def compare(cheap: Round, first: Round, second: Round) -> list[str]:
    """Return what the hostile rounds did to others beyond what is promised."""
    found = []
    for each in (first, second):
        for what, value, base in (
            ("/healthz' p99", each.p99_probe_s, cheap.p99_probe_s),
            ("the victim's median time between tokens", each.median_gap_s, cheap.median_gap_s),
        ):
            if not value <= MAX_RATIO * base:
                found.append(f"{each.name}: {what} is {value / base:.2f} times that beside cheap requests")
    if not second.memory_bytes <= MAX_GROWTH * first.memory_bytes:
        found.append(
            f"memory is {second.memory_bytes / max(1, first.memory_bytes):.2f} times that after the first round"
        )
    return found


def show_alone(report: Report, alone: Sequence[Alone]) -> list[str]:
    rows, violations = [], []
    for each in alone:
        request, outcome = each.outcome.request, each.outcome
        rows.append(
            [
                request.kind,
                request.path,
                f"{len(request.body) / 1000:,.0f}",
                str(NAMES.get(outcome.status, outcome.status)),
                f"{outcome.taken_s:.2f}",
                f"{each.cpu_afterwards_s:.1f}",
                f"{1e3 * each.max_callback_s:.0f}",
                f"{each.more_mib:.0f}",
            ]
        )
        violations += [f"alone: {request.kind} ({request.path}) {fault}" for fault in each.faults()]
    columns = (
        "request",
        "endpoint",
        "kB",
        "status",
        "answered in, s",
        "busy after, s",
        "longest callback, ms",
        "more MiB",
    )
    report.table("One request of each kind, alone", columns, rows)
    return violations


def show_rounds(report: Report, rounds: Sequence[Round]) -> None:
    rows = []
    for each in rounds:
        seen = each.seen
        callbacks = [run.cpu_s for run in each.long_runs if run.kind == "callback"]
        jobs = [run.cpu_s for run in each.long_runs if run.kind == "job"]
        rows.append(
            [
                each.name,
                f"{1e3 * quantile(seen.probes_s, 0.5):.1f}",
                f"{1e3 * each.p99_probe_s:.1f}",
                f"{1e3 * each.median_gap_s:.1f}",
                f"{1e3 * quantile(seen.gaps_s, 0.99):.0f}",
                f"{1e3 * each.median_first_s:.0f}",
                f"{1e3 * max(seen.first_s, default=0.0):.0f}",
                f"{1e3 * max(callbacks, default=0.0):.0f}",
                f"{max(jobs, default=0.0):.2f}",
                f"{each.idle_after_s:.1f}",
                f"{each.memory_bytes / MIB:.0f}",
            ]
        )
    columns = (
        *("round", "/healthz p50, ms", "p99, ms", "between tokens p50, ms", "p99, ms"),
        *("first token p50, ms", "longest, ms"),
        *("longest callback, ms CPU", "longest job, s CPU", "busy after, s", "MiB"),
    )
    report.table("Rounds", columns, rows)
    by_kind: dict[tuple[str, bool], Counter[str]] = {}
    slowest: dict[tuple[str, bool], float] = {}
    for one in (outcome for each in rounds for outcome in each.outcomes):
        key = (one.request.kind, one.request.is_valid)
        by_kind.setdefault(key, Counter())[str(NAMES.get(one.status, one.status))] += 1
        slowest[key] = max(slowest.get(key, 0.0), one.taken_s)
    rows = [
        [
            kind,
            "valid" if is_valid else "hostile",
            ", ".join(f"{s}: {n}" for s, n in ends.most_common()),
            f"{slowest[kind, is_valid]:.1f}",
        ]
        for (kind, is_valid), ends in sorted(by_kind.items(), key=lambda item: (not item[0][1], item[0][0]))
    ]
    report.table("What became of them, all rounds", ("request", "", "statuses", "slowest, s"), rows)


def show_holds(report: Report, long_runs: Sequence[LongRun]) -> None:
    """Add what held the loop and threads longest, and where."""
    grouped: dict[tuple[str, str], list[LongRun]] = {}
    for run in long_runs:
        grouped.setdefault((run.kind, run.name), []).append(run)
    longest = sorted(grouped.items(), key=lambda item: max(run.cpu_s for run in item[1]), reverse=True)[:24]
    rows = []
    for (kind, name), runs in longest:
        stacks = Counter(run.stack for run in runs if run.stack)
        where = stacks.most_common(1)[0][0] if stacks else ""
        num_ended = sum(not run.stack for run in runs)
        rows.append([kind, name, str(num_ended), f"{max(run.cpu_s for run in runs):.3f}", where])
    report.table("What held the loop and the threads", ("", "function", "times", "longest, s CPU", "where"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make hostile", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of each round")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("alone", "rounds"), help="one of the two parts")
    parser.add_argument("--kinds", nargs="+", help="of the requests that are sent alone; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    args = parser.parse_args()
    report = Report("hostile", "Requests that mean harm")
    violations: list[str] = []
    if args.only != "rounds":
        wanted = [each for each in requests.one_of_each(args.seed) if not args.kinds or each.kind in args.kinds]
        violations += show_alone(report, send_alone(wanted))
    if args.only != "alone":
        sent = {
            "cheap": list(requests.cheap_requests(args.requests, args.seed)),
            "hostile": list(requests.requests_of(args.requests, args.seed)),
            "hostile again": list(requests.requests_of(args.requests, args.seed + 1)),
        }
        with system() as running_system:
            asyncio.run(send_all(running_system.url, ATTACKER, sent["cheap"][:40], args.rate))  # warm
            rounds = [run_round(running_system, name, each, args.rate) for name, each in sent.items()]
        show_rounds(report, rounds)
        show_holds(report, [run for each in rounds for run in each.long_runs])
        for each in rounds:
            violations += faults_of(each)
        violations += compare(*rounds)
        report.data["gaps_ms"] = {each.name: 1e3 * each.median_gap_s for each in rounds}
        report.data["probes_p99_ms"] = {each.name: 1e3 * each.p99_probe_s for each in rounds}
        report.data["memory_mib"] = {each.name: each.memory_bytes / MIB for each in rounds}
    report.verdict(
        violations,
        f"Nothing ran for longer than its deadline nor after its client had left, no callback held the event loop for "
        f"{1e3 * MAX_CALLBACK_S:g} ms of CPU, /healthz and the victim were at most {MAX_RATIO:g} times as slow as "
        f"beside cheap requests, and the second hostile round left the memory within {MAX_GROWTH:g} times that of the "
        "first.",
    )
    report.write(args.results)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
