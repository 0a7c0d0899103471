"""Draws the screen of `outrider top` from scrapes. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cli.monitor.series import Labels, Scrape, ScrapeInterval, ratio

BAR_WIDTH = 30
"""Width, in characters, of the bar that stands for the duration of a whole round. With its label and figures it fits
into 80 columns."""
WIDE = 110
"""Minimum width of the terminal, in characters, at which pool and role are columns of the table. On a narrower terminal
they are left out, since a worker's name contains both."""
_NAMES = ("target", "draft")


@dataclass(frozen=True, slots=True)
class SystemView:
    """The data that one frame of `outrider top` shows: the last scrapes of a system."""

    url: str
    """URL of the gateway's HTTP server."""
    now_s: float
    """Time of the last scrapes, in Unix seconds."""
    gateway: ScrapeInterval
    """The last two scrapes of the gateway."""
    readiness: Mapping[str, Any]
    """JSON object of the gateway's last reply of /readyz, with the keys ready, reason and refused."""
    workers: Mapping[str, ScrapeInterval] = field(default_factory=dict)
    """The last two scrapes of each worker that could be scraped, by worker name."""
    away: str | None = None
    """Why the gateway did not reply to the last scrape; None = it replied. If it did not, the other fields are still
    those of the scrapes before."""


def screen(view: SystemView, width: int) -> RenderableType:
    """Return the frame that shows a view on a terminal of `width` columns."""
    parts: list[RenderableType] = [_head(view), *_figures(view.gateway)]
    parts += [Text(f"! {trouble}", style="bold red") for trouble in troubles(view)]
    parts += [Text(), _workers(view, width), Text(), _pairs(view)]
    return Group(*parts, Text(), _round(view.gateway), _ahead(view.gateway))


def _head(view: SystemView) -> Text:
    started_s = view.gateway.after.started_s
    uptime = ""
    if started_s is not None:
        uptime = f"  up {duration(view.now_s - started_s)}"
    if view.away is not None:
        state = ("gone", "bold red")
    elif view.readiness.get("ready"):
        state = ("ready", "bold green")
    else:
        state = ("not ready", "bold red")
    return Text.assemble(("outrider ", "bold"), view.url, "  ", state, uptime, overflow="ellipsis", no_wrap=True)


def _figures(gateway: ScrapeInterval) -> Iterator[Text]:
    tokens_per_step = ratio(gateway.increase("spec_emitted_tokens_total"), _num_steps(gateway, {}))
    yield _line(
        ("running", number(gateway.after.value("outrider_running"))),
        ("waiting", number(gateway.after.value("outrider_queue_depth"))),
        ("answers/s", number(gateway.rate("outrider_requests_total"), 1)),
        ("tokens/s", number(gateway.rate("spec_emitted_tokens_total"), 1)),
        ("tokens per target pass", number(tokens_per_step, 2)),
    )
    yield _line(
        ("first token", _quantiles(gateway, "outrider_time_to_first_token_seconds")),
        ("between tokens", _quantiles(gateway, "outrider_inter_token_seconds")),
    )


def _quantiles(gateway: ScrapeInterval, name: str) -> str:
    return f"p50 {seconds(gateway.quantile(0.5, name))} p95 {seconds(gateway.quantile(0.95, name))}"


def _line(*figures: tuple[str, str]) -> Text:
    line = Text()
    for name, value in figures:
        if line:
            line.append("  ")
        line.append(f"{name} ", "dim")
        line.append(value, "bold")
    return line


def troubles(view: SystemView) -> Iterator[str]:
    """Yield a sentence on each problem that a person should look at. Yields nothing if all is well."""
    now = view.gateway.after
    if view.away is not None:
        yield f"the gateway is gone ({view.away}): what follows is what it said last; asking again"
    elif not view.readiness.get("ready"):
        yield f"no request would be served: {view.readiness.get('reason') or 'the gateway does not say why'}"
    for reason in view.readiness.get("refused", ()):
        yield f"not used: {reason}"
    for labels, lost in now.find("outrider_worker_lost"):
        if lost:
            yield f"{labels['member']} ought to serve and does not"
    for name, counts in _pool_states(view.gateway).items():
        if set(counts) - {"serving"}:
            states = ", ".join(f"{count} {state}" for state, count in counts.items())
            yield f"pool {name}: {states}"
    for labels, connected in now.find("outrider_registry_connected"):
        if not connected:
            yield f"the launcher's registry at {labels['registry']} is away: the last membership stays in force"
    if now.value("outrider_api_keys_outdated"):
        yield "the file of API keys cannot be used: those that it had are in force"
    for member, worker in view.workers.items():
        waiting = worker.after.value("outrider_worker_slots_waiting")
        if waiting:
            yield f"{member}: {waiting:.0f} slots wait for KV blocks: raise kv_cache_tokens, or lower the load"


def _pool_states(gateway: ScrapeInterval) -> dict[str, Counter[str]]:
    """Return the number of workers in each state, by pool."""
    pools: dict[str, Counter[str]] = {}
    for labels, count in gateway.after.find("outrider_members"):
        if count:
            pools.setdefault(labels["pool"], Counter())[labels["state"]] = int(count)
    return pools


def state_of(gateway: ScrapeInterval, member: Labels) -> str:
    """Return the state of a worker, as far as the gateway's metrics tell it.

    The metrics count the workers of a pool by state. If all are in one state, that state is returned. Otherwise the
    result is "connected", "lost" or "away". member: labels of the worker's series, with the keys member and pool.
    """
    states = _pool_states(gateway).get(member["pool"], Counter())
    if len(states) == 1:
        return next(iter(states))
    labels = {"member": member["member"], "pool": member["pool"]}
    if gateway.after.value("outrider_worker_connected", **labels):
        return "connected"
    if gateway.after.value("outrider_worker_lost", **labels):
        return "lost"
    return "away"


def _workers(view: SystemView, width: int) -> Table:
    has_pool = width >= WIDE
    names = ["worker", "state", "model"]
    if has_pool:
        names[1:1] = ["pool", "role"]
    table = _table(*names)
    for name in ("busy", "slots", "KV blocks", "steps/s", "batch"):
        table.add_column(name, justify="right", no_wrap=True)
    for labels, _ in view.gateway.after.find("outrider_worker_connected"):
        cells = [_name(labels["member"])]
        if has_pool:
            cells += [_name(labels["pool"]), _name(labels["worker"])]
        state = state_of(view.gateway, labels)
        style = ""
        if state not in ("serving", "connected"):
            style = "red"
        figures = _worker_figures(view.workers.get(labels["member"]), view.gateway, labels)
        table.add_row(*cells, _name(state, style), *figures)
    return table


def _worker_figures(worker: ScrapeInterval | None, gateway: ScrapeInterval, member: Labels) -> tuple[str | Text, ...]:
    """Return the cells model, busy, slots, KV blocks, steps/s and batch of a worker's line.

    If the worker was not scraped, the cells have only the number of requests that this gateway has there.
    """
    if worker is None:
        placed = gateway.after.value("outrider_member_requests", member=member["member"])
        return (_name("no metrics"), "-", f"{number(placed)} here", "-", "-", "-")
    model = device = ""
    for info, _ in worker.after.find("outrider_worker_info"):
        model = info.get("model", "-")
        device = info.get("device", "")
        break
    return (
        _name(f"{model or '-'} {device}".strip()),
        percent(_busy(worker)),
        _in_use(worker.after, "slots"),
        _in_use(worker.after, "kv_blocks"),
        number(worker.rate("outrider_worker_batch_size_count"), 1),
        number(worker.mean("outrider_worker_batch_size"), 1),
    )


def _in_use(worker: Scrape, what: str) -> str:
    in_use = worker.value(f"outrider_worker_{what}_in_use")
    return f"{number(in_use)}/{number(worker.value(f'outrider_worker_{what}'))}"


def _busy(worker: ScrapeInterval) -> float | None:
    """Return the fraction of the time that a worker spent in steps. A step counts as a whole when it ends, even if it
    began before the interval.
    """
    share = worker.rate("outrider_worker_busy_seconds_total")
    if share is None:
        return None
    return min(1.0, share)


def _pairs(view: SystemView) -> Table:
    """Draw the pairs that made steps in the interval, and those whose workers serve."""
    table = _table(*_NAMES)
    for name in ("accepted", "length", "rounds/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plain steps/s", overflow="fold")
    served = set[str]()
    for worker in view.workers.values():
        served.update(info["model"] for info, _ in worker.after.find("outrider_worker_info"))
    pairs = dict[tuple[str, str], None]()  # a pair has a series for each reason
    for labels, _ in view.gateway.after.find("spec_rounds_total"):
        pairs[labels["target"], labels["draft"]] = None
    for target, draft in pairs:
        if _num_steps(view.gateway, {"target": target, "draft": draft}) or {target, draft} <= served:
            table.add_row(_name(target), _name(draft or "none"), *_pair_figures(view.gateway, target, draft))
    return table


def _pair_figures(gateway: ScrapeInterval, target: str, draft: str) -> list[str]:
    pair = {"target": target, "draft": draft}
    accepted = gateway.increase("spec_accepted_tokens_total", **pair)
    accepted_length = ratio(accepted, gateway.increase("spec_rounds_total", **pair))
    if accepted_length is not None:
        accepted_length += 1  # the recovered or bonus token
    return [
        percent(ratio(accepted, gateway.increase("spec_draft_tokens_total", **pair))),
        number(accepted_length, 2),
        number(gateway.rate("spec_rounds_total", **pair), 1),
        _plain(gateway, pair),
    ]


def _num_steps(gateway: ScrapeInterval, pair: Mapping[str, str]) -> float:
    num_rounds = gateway.increase("spec_rounds_total", **pair) or 0.0
    num_plain_steps = gateway.increase("spec_plain_steps_total", **pair) or 0.0
    return num_rounds + num_plain_steps


def _plain(gateway: ScrapeInterval, pair: Mapping[str, str]) -> str:
    rates = dict[str, float]()
    for labels, _ in gateway.after.find("spec_plain_steps_total", **pair):
        reason = labels["reason"]
        rate = gateway.rate("spec_plain_steps_total", **pair, reason=reason)
        if rate:
            rates[reason] = rate
    if not rates:
        return "-"
    by_rate = sorted(rates, key=lambda reason: -rates[reason])
    return ", ".join(f"{reason} {rates[reason]:.1f}" for reason in by_rate)


def _round(gateway: ScrapeInterval) -> Table:
    """Draw the parts of the time from verdict to verdict, of rounds with drafts.

    A target that runs ahead starts a step before the gateway has the previous verdict: the parts may exceed the total,
    so shares are of the sum of the parts.
    """
    total = gateway.mean("spec_round_seconds", phase="total")
    held = gateway.mean("spec_round_seconds", phase="deliver")
    verify = gateway.mean("spec_round_seconds", phase="verify")
    overhead = None
    if total is not None and held is not None and verify is not None:
        overhead = max(0.0, total - held - verify)
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


def _ahead(gateway: ScrapeInterval) -> Text:
    hits = gateway.increase("spec_lookup_total", result="hit")
    misses = gateway.increase("spec_lookup_total", result="miss")
    share = ratio(hits, (hits or 0.0) + (misses or 0.0))
    late = ratio(gateway.increase("spec_wasted_tokens_total"), gateway.increase("spec_draft_tokens_total"))
    return Text.assemble(
        ("drafts lay ready ", "dim"),
        percent(share),
        (" of the steps; came too late ", "dim"),
        percent(late),
        (" of what was verified", "dim"),
    )


def _table(*names: str) -> Table:
    """Return an empty table that cuts names, and no figures, where the terminal is too narrow."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in names:
        table.add_column(_name(name))
    return table


def _name(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def number(value: float | None, digits: int = 0) -> str:
    """Return a number as text with `digits` decimals, or "-" if it is None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """Return a fraction as text in percent, or "-" if it is None."""
    if share is None:
        return "-"
    return f"{100 * share:.0f} %"


def seconds(value: float | None) -> str:
    """Return a time in seconds as text, in ms below 1 s, or "-" if it is None."""
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.1f} ms"
    return f"{value:.1f} s"


def duration(value_s: float) -> str:
    """Return a long time, given in seconds, as text in its two largest units, such as "1 h 5 min"."""
    rest_s = max(0, int(value_s))
    parts = list[str]()
    for size_s, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if rest_s >= size_s or (parts and len(parts) < 2):
            parts.append(f"{rest_s // size_s} {name}")
        rest_s %= size_s
    return " ".join(parts[:2]) or "0 s"
