"""What `outrider top` shows: one screen drawn from scrapes. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cli.monitor.series import Labels, Span, ratio

BAR_WIDTH = 30
"""Columns of a whole round: beside label and figures it fits a terminal of 80."""
WIDE = 110
"""Columns from which on pool and role have columns of their own; a worker's name says both."""
_NAMES = ("target", "draft")


@dataclass(frozen=True, slots=True)
class View:
    """All that was read of a system last."""

    url: str
    now_s: float
    """Unix seconds."""
    gateway: Span
    readiness: Mapping[str, Any]
    """What /readyz said: ready, reason, refused."""
    workers: Mapping[str, Span] = field(default_factory=dict)
    """By the member's name: those whose metrics could be read."""
    away: str | None = None
    """Why the gateway could not be read now; what else is here is older then."""


def screen(view: View, width: int) -> RenderableType:
    """Draw all of it for a terminal of so many columns."""
    parts: list[RenderableType] = [_head(view), *_figures(view.gateway)]
    parts += [Text(f"! {each}", style="bold red") for each in troubles(view)]
    parts += [Text(), _workers(view, width), Text(), _pairs(view)]
    return Group(*parts, Text(), _round(view.gateway), _ahead(view.gateway))


def _head(view: View) -> Text:
    started_s = view.gateway.after.started_s
    uptime = "" if started_s is None else f"  up {duration(view.now_s - started_s)}"
    if view.away is not None:
        state = ("gone", "bold red")
    elif view.readiness.get("ready"):
        state = ("ready", "bold green")
    else:
        state = ("not ready", "bold red")
    return Text.assemble(("outrider ", "bold"), view.url, "  ", state, uptime, overflow="ellipsis", no_wrap=True)


def _figures(gateway: Span) -> Iterator[Text]:
    tokens = gateway.increase("spec_emitted_tokens_total")
    passes = [gateway.increase(f"spec_{name}_total") or 0.0 for name in ("rounds", "plain_steps")]
    yield _line(
        ("running", number(gateway.after.value("outrider_running"))),
        ("waiting", number(gateway.after.value("outrider_queue_depth"))),
        ("answers/s", number(gateway.rate("outrider_requests_total"), 1)),
        ("tokens/s", number(gateway.rate("spec_emitted_tokens_total"), 1)),
        ("tokens per target pass", number(ratio(tokens, sum(passes)), 2)),
    )
    yield _line(
        *(
            (what, " ".join(f"p{100 * share:.0f} {seconds(gateway.quantile(share, name))}" for share in (0.5, 0.95)))
            for what, name in (
                ("first token", "outrider_time_to_first_token_seconds"),
                ("between tokens", "outrider_inter_token_seconds"),
            )
        )
    )


def _line(*figures: tuple[str, str]) -> Text:
    parts = [part for name, value in figures for part in ((f"{name} ", "dim"), (value, "bold"), "  ")]
    return Text.assemble(*parts[:-1])


def troubles(view: View) -> Iterator[str]:
    """Say what a person should look at, a line each; nothing where all is well."""
    now = view.gateway.after
    if view.away is not None:
        yield f"the gateway is gone ({view.away}): what follows is what it said last; asking again"
    elif not view.readiness.get("ready"):
        yield f"no request would be served: {view.readiness.get('reason') or 'the gateway does not say why'}"
    yield from (f"not used: {each}" for each in view.readiness.get("refused", ()))
    for found, lost in now.find("outrider_worker_lost"):
        if lost:
            yield f"{found['member']} ought to serve and does not"
    for name, counts in _pool_states(view.gateway).items():
        if set(counts) - {"serving"}:
            yield f"pool {name}: {', '.join(f'{count} {state}' for state, count in counts.items())}"
    for found, connected in now.find("outrider_registry_connected"):
        if not connected:
            yield f"the launcher's registry at {found['registry']} is away: the last membership stays in force"
    if now.value("outrider_api_keys_outdated"):
        yield "the file of API keys cannot be used: those that it had are in force"
    for member, worker in view.workers.items():
        waiting = worker.after.value("outrider_worker_slots_waiting")
        if waiting:
            yield f"{member}: {waiting:.0f} slots wait for KV blocks: raise kv_cache_tokens, or lower the load"


def _pool_states(gateway: Span) -> dict[str, Counter[str]]:
    """Members by state, of each pool that has any."""
    pools: dict[str, Counter[str]] = {}
    for found, count in gateway.after.find("outrider_members"):
        if count:
            pools.setdefault(found["pool"], Counter())[found["state"]] = int(count)
    return pools


def state_of(gateway: Span, member: Labels) -> str:
    """Return a member's state as far as series say: by name only whether it is connected and ought to be; the others
    by pool, where all members of one are in the same.
    """
    states = _pool_states(gateway).get(member["pool"], Counter())
    if len(states) == 1:
        return next(iter(states))
    of_it = {"member": member["member"], "pool": member["pool"]}
    if gateway.after.value("outrider_worker_connected", **of_it):
        return "connected"
    return "lost" if gateway.after.value("outrider_worker_lost", **of_it) else "away"


def _workers(view: View, width: int) -> Table:
    with_pool = width >= WIDE
    table = _table("worker", *(("pool", "role") if with_pool else ()), "state", "model")
    for name in ("busy", "slots", "KV blocks", "steps/s", "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    for found, _ in view.gateway.after.find("outrider_worker_connected"):
        state = state_of(view.gateway, found)
        pool = (found["pool"], found["worker"]) if with_pool else ()
        figures = _worker_figures(view.workers.get(found["member"]), view.gateway, found)
        style = "" if state in ("serving", "connected") else "red"
        table.add_row(*map(_name, (found["member"], *pool)), _name(state, style), *figures)
    return table


def _worker_figures(worker: Span | None, gateway: Span, member: Labels) -> tuple[str | Text, ...]:
    """What it is, then figures; without metrics of its own only how many answers this gateway has there."""
    if worker is None:
        placed = gateway.after.value("outrider_member_requests", member=member["member"])
        return (_name("no metrics"), "-", f"{number(placed)} here", "-", "-", "-")
    is_, now = "outrider_worker_", worker.after
    info = next((found for found, _ in now.find(f"{is_}info")), {})
    return (
        _name(f"{info.get('model', '-')} {info.get('device', '')}".strip()),
        percent(_busy(worker)),
        f"{number(now.value(f'{is_}slots_in_use'))}/{number(now.value(f'{is_}slots'))}",
        f"{number(now.value(f'{is_}kv_blocks_in_use'))}/{number(now.value(f'{is_}kv_blocks'))}",
        number(worker.rate(f"{is_}batch_size_count"), 1),
        number(worker.mean(f"{is_}batch_size"), 1),
    )


def _busy(worker: Span) -> float | None:
    """Return the share of the time in steps. A step counts when it ends, also what of it was before the interval."""
    share = worker.rate("outrider_worker_busy_seconds_total")
    return None if share is None else min(1.0, share)


def _pairs(view: View) -> Table:
    """Pairs that made steps in the interval, and those whose workers serve."""
    gateway, table = view.gateway, _table(*_NAMES)
    for name in ("accepted", "length", "rounds/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plain steps/s", overflow="fold")
    served = {info["model"] for each in view.workers.values() for info, _ in each.after.find("outrider_worker_info")}
    pairs = dict.fromkeys(tuple(found[name] for name in _NAMES) for found, _ in gateway.after.find("spec_rounds_total"))
    for target, draft in pairs:
        pair = {"target": target, "draft": draft}
        if not (_num_steps(gateway, pair) or {target, draft} <= served):
            continue
        accepted = gateway.increase("spec_accepted_tokens_total", **pair)
        kept = ratio(accepted, gateway.increase("spec_rounds_total", **pair))
        table.add_row(
            _name(target),
            _name(draft or "none"),
            percent(ratio(accepted, gateway.increase("spec_draft_tokens_total", **pair))),
            number(None if kept is None else 1 + kept, 2),
            number(gateway.rate("spec_rounds_total", **pair), 1),
            _plain(gateway, pair),
        )
    return table


def _num_steps(gateway: Span, pair: Mapping[str, str]) -> float:
    return sum(gateway.increase(f"spec_{name}_total", **pair) or 0.0 for name in ("rounds", "plain_steps"))


def _plain(gateway: Span, pair: Mapping[str, str]) -> str:
    rates = {
        found["reason"]: gateway.rate("spec_plain_steps_total", **pair, reason=found["reason"]) or 0.0
        for found, _ in gateway.after.find("spec_plain_steps_total", **pair)
    }
    often = sorted((reason for reason, rate in rates.items() if rate), key=lambda reason: -rates[reason])
    return ", ".join(f"{reason} {rates[reason]:.1f}" for reason in often) or "-"


def _round(gateway: Span) -> Table:
    """Where the time from verdict to verdict goes, of rounds with drafts. A target that runs ahead begins a step before
    the verdict before is heard of: its parts may exceed their total, so shares are of the sum of the parts.
    """
    name = "spec_round_seconds"
    total, held, verify = (gateway.mean(name, phase=phase) for phase in ("total", "deliver", "verify"))
    overhead = None if total is None or held is None or verify is None else max(0.0, total - held - verify)
    parts = {"held for drafts": held, "verify": verify, "overhead": overhead}
    whole = sum(part or 0.0 for part in parts.values())
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("a round", seconds(total), "")
    for label, mean in parts.items():
        share = ratio(mean, whole)
        bar = Text("█" * round(BAR_WIDTH * (share or 0.0)), "cyan")
        table.add_row(f"  {label}", seconds(mean), bar + Text(f" {percent(share)}"))
    return table


def _ahead(gateway: Span) -> Text:
    hits, misses = (gateway.increase("spec_lookup_total", result=each) for each in ("hit", "miss"))
    share = ratio(hits, (hits or 0.0) + (misses or 0.0))
    late = ratio(gateway.increase("spec_wasted_tokens_total"), gateway.increase("spec_draft_tokens_total"))
    return Text.assemble(
        *(("drafts lay ready ", "dim"), percent(share), (" of the steps; came too late ", "dim"), percent(late)),
        (" of what was verified", "dim"),
    )


def _table(*names: str) -> Table:
    """Where there is no room, names are cut and figures are not: only columns that may wrap give way."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in names:
        table.add_column(_name(name))
    return table


def _name(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def seconds(value: float | None) -> str:
    """Return seconds in a unit for people."""
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.1f} s"


def duration(value_s: float) -> str:
    """Return a long time in its two largest units: 1 h 5 min."""
    units: Sequence[tuple[int, str]] = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    rest, found = max(0, int(value_s)), list[str]()
    for size, name in units:
        if rest >= size or (found and len(found) < 2):
            found.append(f"{rest // size} {name}")
        rest %= size
    return " ".join(found[:2]) or "0 s"
