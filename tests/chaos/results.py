"""The tables: how long streams waited after each kind of fault, and what was seen that must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.common import Report
from tests.chaos.faults import FAULTS, Strike
from tests.chaos.load import Load, Stream

QUIET = "nothing (before the first)"
NUM_QUIET_MOMENTS = 40
LATE_READERS = ("openai whole", "slow reader")
"""They see a token later than it came."""


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def waits(streams: Sequence[Stream], moment_s: float, gateway: int | None = None) -> list[float]:
    """From that moment to the next token, of every stream that was running; at one gateway when it says so."""
    prompt = (stream for stream in streams if stream.kind not in LATE_READERS)
    there = (stream for stream in prompt if gateway is None or stream.gateway_at(moment_s) == gateway)
    found = (stream.next_after(moment_s) for stream in there if stream.running_at(moment_s))
    return [each for each in found if each is not None]


def quiet_waits(streams: Sequence[Stream], from_s: float, to_s: float) -> list[float]:
    """The same at moments when nothing happened."""
    step_s = (to_s - from_s) / NUM_QUIET_MOMENTS
    return [each for index in range(NUM_QUIET_MOMENTS) for each in waits(streams, from_s + index * step_s)]


def add_recovery(report: Report, load: Load, strikes: Sequence[Strike], quiet: Sequence[float]) -> None:
    """A stream counts as paused when it waited longer than 99 of 100 do when nothing happens."""
    usual_s = quantile(quiet, 0.99)
    rows = [[QUIET, "", str(len(quiet)), *_row(quiet), "", "", ""]]
    data: dict[str, list[list[float]]] = {QUIET: [list(quiet)]}
    for kind in FAULTS:
        of_kind = [strike for strike in strikes if strike.planned.fault == kind and strike.began_s is not None]
        if not of_kind:
            continue
        by_strike = [waits(load.streams, strike.began_s or 0.0, strike.gateway) for strike in of_kind]
        every = [each for some in by_strike for each in some]
        paused = [each for each in every if each > usual_s]
        freed = [strike.freed_s for strike in of_kind if strike.freed_s is not None]
        rows.append(
            [
                kind,
                str(len(of_kind)),
                str(len(every)),
                *(_row(every) if every else ["", "", ""]),
                str(len(paused)),
                f"{quantile(paused, 0.5):.2f}" if paused else "",
                f"{max(freed):.1f}" if freed else "",
            ]
        )
        data[kind] = by_strike
    columns = ("fault", "times", "streams", "p50, s", "p99, s", "max, s", "paused", "p50 of these, s", "slots freed, s")
    report.table("From the fault to the next token of each stream that was running", columns, rows)
    report.text(
        "streams: all that were running and could be hit, for a gateway or its links those of that gateway. paused: "
        f"those that waited longer than {usual_s:.2f} s, which 99 of 100 do not when nothing happens. slots freed: the "
        "longest time that the workers held more slots than the living gateways had answers."
    )
    report.data["waits_s"] = data


def _row(values: Sequence[float]) -> list[str]:
    return [f"{quantile(values, share):.2f}" for share in (0.5, 0.99, 1.0)]


def add_streams(report: Report, load: Load) -> None:
    ended = Counter(stream.kind for stream in load.streams if stream.ended_s is not None and stream.violation is None)
    started = Counter(stream.kind for stream in load.streams)
    asked_again = Counter(stream.kind for stream in load.streams if stream.num_retries)
    rows = [[kind, str(started[kind]), str(ended[kind]), str(asked_again[kind])] for kind in sorted(started)]
    rows.append(["all", str(started.total()), str(ended.total()), str(asked_again.total())])
    report.table("Streams", ("kind", "started", "ended as they should", "asked again"), rows)
    report.text("asked again: its gateway was killed, or had no target at all for a while.")


def add_verdict(report: Report, violations: Sequence[str], strikes: Sequence[Strike]) -> None:
    if violations:
        report.text("## Violations\n\n" + "\n".join(f"- {each}" for each in violations))
    else:
        report.text(
            "No token was wrong, repeated or lost; every stream ended; afterwards no slot, block, ticket, answer or "
            "connection was left in any part."
        )
    report.data["violations"] = list(violations)
    report.data["strikes"] = [
        {
            "at_s": strike.planned.at_s,
            "fault": strike.planned.fault,
            "part": strike.part,
            "took_s": (strike.over_s or 0.0) - (strike.began_s or 0.0),
            "violation": strike.violation,
        }
        for strike in strikes
    ]
