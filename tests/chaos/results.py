"""The tables: how long streams waited after each kind of fault, and what was seen that must not be."""

import itertools
from collections import Counter
from collections.abc import Sequence

from benchmarks.common import Report
from outrider.lab.load.figures import quantile
from tests.chaos.excuses import RECOVERED_WITHIN_S
from tests.chaos.faults import FAULTS, JUDGED_AFTER_S, NOTICED_WITHIN_S, Strike
from tests.chaos.load import REQUEST_TIMEOUT_S, Load, Stream
from tests.chaos.plan import PAUSE_BEFORE_S

QUIET = "nothing (before the first)"
NUM_QUIET_MOMENTS = 40
LATE_READERS = ("openai whole", "slow reader")
"""They see a token later than it came."""
NOTICED = ("draft hung", "target hung", "gateway hung", "gateway and target cut", "gateway and draft cut")
OF_A_DRAFT = tuple(kind for kind in FAULTS if "draft" in kind and not kind.startswith("draft and target"))


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


def gaps(streams: Sequence[Stream], from_s: float, to_s: float, gateway: int | None = None) -> list[float]:
    """Between one token's coming and the next one's, where they touch that time; at one gateway when it says so."""
    found = []
    for stream in streams:
        if stream.kind not in LATE_READERS and gateway in (None, stream.gateway_at(to_s)):
            pairs = itertools.pairwise(stream.arrivals_s)
            found += [late_s - early_s for early_s, late_s in pairs if late_s > from_s and early_s < to_s]
    return found


def add_recovery(report: Report, load: Load, strikes: Sequence[Strike], quiet: Sequence[float]) -> None:
    """A stream counts as paused when it waited longer than 99 of 100 do when nothing happens."""
    usual_s = quantile(quiet, 0.99) if quiet else 0.0
    began_s = min((stream.started_s for stream in load.streams), default=0.0)
    usual_gaps = gaps(load.streams, began_s, began_s + PAUSE_BEFORE_S - 1.0)
    rows = [[QUIET, "", str(len(quiet)), *_row(quiet, (0.5, 1.0)), "", "", *_row(usual_gaps, (0.95,))]]
    data: dict[str, list[list[float]]] = {QUIET: [list(quiet)]}
    for kind, of_kind in _by_kind(strikes).items():
        by_strike = [waits(load.streams, strike.began_s or 0.0, strike.gateway) for strike in of_kind]
        between = [
            gap
            for each in of_kind
            for gap in gaps(load.streams, each.began_s or 0.0, (each.over_s or 0.0) + RECOVERED_WITHIN_S, each.gateway)
        ]
        every = [each for some in by_strike for each in some]
        paused = [each for each in every if each > usual_s]
        times, median = _row(every, (0.5, 1.0)), _row(paused, (0.5,))
        counts = [str(len(of_kind)), str(len(every))]
        rows.append([kind, *counts, *times, str(len(paused)), *median, *_row(between, (0.95,))])
        data[kind] = by_strike
    columns = ("fault", "times", "streams", "p50, s", "max, s", "paused", "p50 of these, s", "p95 gap, s")
    report.table("From the fault to the next token of each stream that was running", columns, rows)
    report.text(
        "streams: all that were running and could be hit, for a gateway or its links those of that gateway. paused: "
        f"those that waited longer than {usual_s:.2f} s, which 99 of 100 do not when nothing happens. p95 gap: between "
        f"two messages of a stream, from the fault until {RECOVERED_WITHIN_S:g} s after it was over."
    )
    report.data["waits_s"] = data


def add_strikes(report: Report, strikes: Sequence[Strike]) -> None:
    """What the parts themselves showed."""
    rows = []
    for kind, of_kind in _by_kind(strikes).items():
        cells = [
            _seen([strike.noticed_s for strike in of_kind]) if kind in NOTICED else "",
            _seen([strike.freed_s for strike in of_kind]) if kind == "gateway killed" else "",
            _seen([strike.drafting_s for strike in of_kind]) if kind in OF_A_DRAFT else "",
        ]
        rows.append([kind, str(len(of_kind)), *cells])
    columns = ("fault", "times", "noticed after, s", "slots freed after, s", "drafts again after, s")
    report.table("What the parts showed: median, longest, how often it could be seen", columns, rows)
    every = [strike.noticed_s for strike in strikes if strike.noticed_s is not None]
    waited = [strike.waited_s for strike in strikes if strike.waited_s > 0.05]
    report.text(
        "noticed: until every gateway that was connected had given the link up, or the workers a hung gateway's "
        f"slots; {NOTICED_WITHIN_S:g} s are promised, more than {JUDGED_AFTER_S:g} s are a violation, "
        f"{sum(each > NOTICED_WITHIN_S for each in every)} of {len(every)} were between. A strike that was over before "
        "is not seen. slots freed: until the workers held no more slots than the living gateways had answers; not to "
        "be seen while a target is struck. drafts again: from the end of the strike until the draft proposed for the "
        f"streams of a gateway. {len(waited)} strikes waited for a part that nothing else struck"
        + (f", the longest {max(waited):.1f} s." if waited else ".")
    )


def _by_kind(strikes: Sequence[Strike]) -> dict[str, list[Strike]]:
    """Those that happened, in the order of FAULTS."""
    found = {kind: [each for each in strikes if each.planned.fault == kind and each.began_s] for kind in FAULTS}
    return {kind: of_kind for kind, of_kind in found.items() if of_kind}


def _row(values: Sequence[float], shares: Sequence[float]) -> list[str]:
    return [f"{quantile(values, share):.2f}" if values else "" for share in shares]


def _seen(values: Sequence[float | None]) -> str:
    found = [each for each in values if each is not None]
    if not found:
        return "not seen"
    return f"{quantile(found, 0.5):.1f}, {max(found):.1f} ({len(found)} of {len(values)})"


def add_streams(report: Report, load: Load) -> None:
    late = Counter(stream.kind for stream in load.streams if stream.out_of_time)
    ended = Counter(stream.kind for stream in load.streams if stream.ended_s is not None and not stream.violation)
    ended -= late
    started = Counter(stream.kind for stream in load.streams)
    asked_again = Counter(stream.kind for stream in load.streams if stream.num_retries)
    counts = (started, ended, asked_again, late)
    rows = [[kind, *(str(each[kind]) for each in counts)] for kind in sorted(started)]
    rows.append(["all", *(str(each.total()) for each in counts)])
    report.table("Streams", ("kind", "started", "ended as they should", "asked again", "out of time"), rows)
    report.text(
        "asked again: its gateway was killed or hung, or had no target at all for a while. out of time: tokens came "
        f"until its gateway ended it after {REQUEST_TIMEOUT_S:g} s, as it says it does (request_timeout_s)."
    )


def add_verdict(report: Report, violations: Sequence[str], strikes: Sequence[Strike]) -> None:
    report.verdict(
        violations,
        "No token was wrong, repeated or lost (sampled streams have no answer to compare with: none was lost); "
        "every stream ended; every hang and cut that lasted was noticed; afterwards every draft was used again "
        "through every gateway, every link was up and every breaker closed, and no slot, block, ticket, answer or "
        "connection was left in any part.",
    )
    report.data["strikes"] = [
        {
            "at_s": strike.planned.at_s,
            "fault": strike.planned.fault,
            "part": strike.part,
            "took_s": (strike.over_s or 0.0) - (strike.began_s or 0.0),
            "waited_s": strike.waited_s,
            "noticed_s": strike.noticed_s,
            "freed_s": strike.freed_s,
            "drafting_s": strike.drafting_s,
            "violations": strike.violations,
        }
        for strike in strikes
    ]
