"""The report of `bench-overlap`: what each group measured, beside what was expected of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.common import Report
from benchmarks.overlap.expected import draft_service_s, estimate, service_costs, target_service_s
from benchmarks.overlap.groups import COUPLED, GREEDY
from benchmarks.overlap.results import (
    CHAIN,
    CHAIN_BOTH,
    FATES,
    ON_ONE_CORE,
    OVERLAP_CHAIN,
    OVERLAP_TREE,
    OVERLAPPED,
    PARTS,
    PLAIN,
    PLAIN_BOTH,
    PLAIN_LEASE,
    PLAIN_TODAY,
    SPLIT,
    TODAY,
    Cell,
    GroupResult,
)
from benchmarks.overlap.simulation import Estimate
from benchmarks.overlap.traces import Traces
from benchmarks.passes import Ratio

FANS = (1, 2, 4, 8)
"""Numbers of guesses that hit rates are told for."""
FAR_OFF = 0.1
"""Share by which a measurement may differ from the simulation before it is marked."""
MARK = "†"
NEAR = 0.1
"""Longest round trip, in steps, that the goals are for."""
GOALS = {(GREEDY, 0.05): 1.15, (GREEDY, 0.1): 1.25, (GREEDY, 0.2): 1.38}
GOALS |= {(COUPLED, 0.05): 1.13, (COUPLED, 0.1): 1.18, (COUPLED, 0.2): 1.3}
"""What the design expects over the tuned colocated chain, by rule and cost of a draft's step."""


def add_group(report: Report, result: GroupResult, traces: Traces) -> list[str]:
    """Add the tables of a group and return which goals it misses."""
    name = result.group.name
    _add_head(report, result)
    report.table(f"{name}: speed", *_speeds(result))
    report.table(f"{name}: where the time goes", *_times(result))
    report.table(f"{name}: beside the simulation", *_beside(result, traces))
    report.table(f"{name}: hit rate by number of guesses, from traces", *_hits(result, traces))
    if result.contention:
        report.text(_contention(result))
    report.text(_cores(result))
    report.text(_texts(result))
    report.data[name] = {
        _label(cell): [[each.prompt, each.repetition, each.num_tokens, each.seconds] for each in cell.answers]
        for cell in result.cells()
    }
    return _missed(result)


def _add_head(report: Report, result: GroupResult) -> None:
    costs, tuned, tree = service_costs(result), result.tuned, result.tuned.tree
    verify, draft = (", ".join(f"{rows}: {_ms(s)}" for rows, s in each.items()) for each in (costs.verify, costs.draft))
    trips = ", ".join(f"{name:g} is {_ms(seconds)} ms" for name, seconds in result.round_trips_s.items())
    today = ", ".join(f"{k} at {name:g}" for name, k in tuned.today.items())
    report.text(
        f"# {result.group.name}\n\n"
        f"{result.num_repetitions} repetitions of {result.max_tokens} tokens, {result.minutes:.0f} minutes, load at "
        f"start {result.load_at_start:.1f}. Today is {result.base}. "
        f"A step of the draft takes {costs.draft[1] / result.step_s:.3f} of one of the target, "
        f"{_ms(result.step_s)} ms. Milliseconds of a forward by rows, target: {verify}; draft: {draft}. Deciding takes "
        f"{_ms(costs.decide_s)} ms a step, drawing {_ms(costs.draw_s)} ms a node. In a service a step of the target "
        f"takes {_ms(costs.target_service_s)} ms more, and the gateway's turn {_ms(costs.gateway_s)} ms. Round trips, "
        f"in steps: {trips}. Tuned: colocated chain K = {tuned.chain}, both cores {tuned.chain_both}; colocated tree "
        f"{'none' if tree is None else f'of {len(tree.paths)} nodes, depth {tree.depth}'}; today K = {today}."
    )


def _contention(result: GroupResult) -> str:
    """Say what of a step's extra in the service is the machine's: two processes, no messages between them."""
    low, high = min(result.contention), max(result.contention)
    return (
        f"A forward of the target takes {low:.2f} to {high:.2f} times as long while the draft makes steps on the other "
        "core, without messages: both read their weights from one memory. A pair in one process never does."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _label(cell: Cell) -> str:
    return cell.arm if cell.round_trip is None else f"{cell.arm}, {cell.round_trip:g}"


def best_local(result: GroupResult) -> Cell:
    """Return the fastest arm without a network on the target's own core."""
    found = [cell for arm in ON_ONE_CORE if (cell := result.cell(arm, None)) is not None]
    return max(found, key=lambda cell: cell.tokens_per_s)


def _over(cell: Cell, other: Cell | None) -> str:
    return "" if other is None or other is cell else str(Ratio.of(cell.over(other)))


def _speeds(result: GroupResult) -> tuple[Sequence[str], list[list[str]]]:
    best, chain = best_local(result), result.cell(CHAIN, None)
    columns = ("arm, round trip", "tok/s", "over colocated chain", f"over {best.arm}, the best on one core")
    rows = []
    for cell in result.cells():
        today = None if cell.round_trip is None else result.cell(TODAY, cell.round_trip)
        if cell.arm == PLAIN_LEASE:
            today = result.cell(PLAIN_TODAY, cell.round_trip)
        ratios = [
            _over(cell, other) for other in (chain, best, today if cell.arm in (*OVERLAPPED, PLAIN_LEASE) else None)
        ]
        rows.append([_label(cell), f"{cell.tokens_per_s:.1f}", *ratios])
    return (*columns, "over today"), rows


def _times(result: GroupResult) -> tuple[Sequence[str], list[list[str]]]:
    columns = ["arm, round trip", "tokens a step", "drafted a step", "kept", "target idle", "draft idle", "hits"]
    columns += ["held, ms a step", "draft's step, ms (rows)", "draft's bytes a token", "gateway's bytes a token"]
    columns += [*(f"{fate} nodes a token" for fate in FATES), *(f"CPU of the {part}, ms a token" for part in PARTS)]
    rows = []
    for cell in result.cells():
        drafted, steps, kept = cell.total("num_drafted"), cell.total("num_steps"), cell.total("num_accepted")
        row = [
            _label(cell),
            f"{cell.tokens_per_step:.2f}",
            f"{drafted / steps:.1f}",
            _share(kept / drafted if drafted else None),
        ]
        row += [_share(cell.idle("target")), _share(cell.idle("draft")) if drafted else ""]
        row += _of_services(cell) if cell.arm in SPLIT else [""] * (5 + len(FATES) + len(PARTS))
        rows.append(row)
    return columns, rows


def _of_services(cell: Cell) -> list[str]:
    """Return hits, time held, the draft's steps and bytes a token, of arms that have services."""
    num_ids = sum(len(each.ids) for each in cell.answers)
    steps, draft_steps = cell.total("target_steps"), cell.total("draft_steps")
    held = f"{1e3 * cell.total('held') / steps:.2f}" if cell.arm in OVERLAPPED else ""
    drafting = f"{1e3 * cell.total('draft_busy') / draft_steps:.2f} ({cell.draft_rows:.1f})" if draft_steps else ""
    num_bytes = [f"{cell.total(f'{part}_bytes') / num_ids:.0f}" for part in ("draft", "gateway")]
    parked = [f"{cell.total(f'parked_{fate}') / num_ids:.1f}" if cell.arm in OVERLAPPED else "" for fate in FATES]
    computed = [_ms(cell.total(f"{part}_cpu") / num_ids) for part in PARTS]
    return [_share(cell.hit_rate), held, drafting, *num_bytes, *parked, *computed]


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _beside(result: GroupResult, traces: Traces) -> tuple[Sequence[str], list[list[str]]]:
    columns = ["arm, round trip", "tok/s", "simulated", "measured / simulated", "tokens a step", "simulated"]
    columns += ["target idle", "simulated", "draft idle", "simulated", "hits", "simulated"]
    columns += ["extra in the service, ms a step: target", "draft"]
    rows = []
    for cell in result.cells():
        said = estimate(result, traces, cell)
        if said is None:
            continue
        ratio = cell.tokens_per_s / said.tokens_per_s
        row = [_label(cell), f"{cell.tokens_per_s:.1f}", f"{said.tokens_per_s:.1f}"]
        row += [f"{ratio:.2f}{MARK if abs(ratio - 1.0) > FAR_OFF else ''}"]
        row += [f"{cell.tokens_per_step:.2f}", f"{said.num_tokens / said.num_steps:.2f}"]
        row += [_share(cell.idle("target")), _share(said.target_idle)]
        row += [_share(cell.idle("draft")), _share(said.draft_idle)] if said.draft_s else ["", ""]
        row += _lookups(cell, said)
        extra = (target_service_s, draft_service_s) if cell.arm in SPLIT else ()
        rows.append([*row, *(_ms(each(result, cell)) for each in extra), *([""] * (2 - len(extra)))])
    return columns, rows


def _lookups(cell: Cell, said: Estimate) -> list[str]:
    return [_share(cell.hit_rate), _share(said.num_hits / said.num_steps)] if cell.arm in OVERLAPPED else ["", ""]


def _hits(result: GroupResult, traces: Traces) -> tuple[Sequence[str], list[list[str]]]:
    found = traces.hit_rates(result.tuned.chain, FANS)
    rows = [[kind, *(_share(rate) for rate in rates)] for kind, rates in found.items()]
    return (f"the target's own token after a chain of {result.tuned.chain}", *map(str, FANS)), rows


def _cores(result: GroupResult) -> str:
    """Say whether two cores on one target beat a core each."""
    both = [cell for arm in (PLAIN_BOTH, CHAIN_BOTH) if (cell := result.cell(arm, None)) is not None]
    shared = max(both, key=lambda cell: cell.tokens_per_s)
    each = max((cell for cell in result.cells() if cell.arm in OVERLAPPED), key=lambda cell: cell.tokens_per_s)
    ratio = Ratio.of(shared.over(each))
    said = (
        "Two cores on one target beat a core each" if ratio.low > 1.0 else "A core each beats two cores on one target"
    )
    if ratio.low <= 1.0 <= ratio.high:
        said = "Two cores on one target and a core each are not told apart"
    return f"**{said} here: {shared.arm} is {ratio} times as fast as {_label(each)}, the fastest with a core each.**"


def _texts(result: GroupResult) -> str:
    """Say in how many answers an arm's text is another than plain decoding's."""
    if not result.group.determined:
        return "Under rejection texts depend on what is drafted."
    plain = {(each.prompt, each.repetition): each.ids for each in result.answers if each.arm == PLAIN}
    others = [each for each in result.answers if each.arm != PLAIN]
    differ = [each for each in others if each.ids != plain[each.prompt, each.repetition]]
    arms = sorted({each.arm for each in differ})
    where = f" ({', '.join(arms)}): near ties, where none of them alone differs often" if arms else ""
    return f"{len(differ)} of {len(others)} answers have another text than plain decoding's{where}."


def _missed(result: GroupResult) -> list[str]:
    """Return where an overlapped round is slower than a colocated arm on one core, or than the design expects."""
    best, chain, missed = best_local(result), result.cell(CHAIN, None), list[str]()
    wanted = GOALS.get((result.group.rule, result.group.cost))
    assert chain is not None, "every group has a colocated chain"
    for round_trip in (each for each in result.round_trips_s if each <= NEAR):
        cells = [cell for arm in (OVERLAP_CHAIN, OVERLAP_TREE) if (cell := result.cell(arm, round_trip)) is not None]
        cell = max(cells, key=lambda each: each.tokens_per_s)
        where = f"{result.group.name}, {_label(cell)}"
        if (ratio := Ratio.of(cell.over(best))).middle < 1.0:
            missed.append(f"{where}: {ratio} of {best.arm}, at least 1.0 wanted")
        if wanted is not None and (ratio := Ratio.of(cell.over(chain))).middle < wanted:
            missed.append(f"{where}: {ratio} of the colocated chain, {wanted:g} expected")
    return missed


def add_summary(report: Report, results: Sequence[GroupResult]) -> None:
    """Add one table over all groups."""
    rows = []
    for result in results:
        best, chain = best_local(result), result.cell(CHAIN, None)
        for round_trip in result.round_trips_s:
            today = result.cell(TODAY, round_trip)
            for arm in OVERLAPPED:
                if (cell := result.cell(arm, round_trip)) is not None:
                    ratios = [_over(cell, other) for other in (chain, best, today)]
                    rows.append([f"{result.group.name}: {_label(cell)}", f"{cell.tokens_per_s:.1f}", *ratios, best.arm])
    columns = ("group: arm, round trip", "tok/s", "over colocated chain", "over the best on one core", "over today")
    report.table("All groups", (*columns, "the best on one core"), rows)
    report.data["costs"] = {result.group.name: asdict(result.costs) for result in results}
