"""What `outrider top` shows in 80 columns, with whatever names."""

import asyncio
import io
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from rich.console import Console

from outrider.cli.monitor.series import Scrape, ScrapeInterval
from outrider.cli.monitor.top import SystemReader
from outrider.cli.monitor.top_screen import SystemView, screen
from outrider.wire.telemetry.metrics import GatewayMetrics, WorkerMetrics

MEMBERS = """\
outrider_members{{pool="chat",role="target",state="serving"}} {serving}
outrider_members{{pool="chat",role="target",state="lost"}} {lost}
outrider_worker_connected{{worker="target",member="target-chat-0",pool="chat"}} {serving}
outrider_worker_lost{{worker="target",member="target-chat-0",pool="chat"}} {lost}
outrider_member_requests{{member="target-chat-0",pool="chat"}} 3
"""
BAD_ADDRESSES = ("[::1", "[::::]:1", "w:1/path", "w:1?query", "u@w:1", "w:65536")


def drawn(view: SystemView, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(view, width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def system(serving: int, **workers: ScrapeInterval) -> SystemView:
    """A gateway at work with one target; `serving`: whether that serves."""
    metrics = GatewayMetrics()
    pair = metrics.pair(40 * "target", "hub/" + 40 * "draft")
    members = MEMBERS.format(serving=serving, lost=1 - serving)
    metrics.pair("target", "idle").rounds.inc(3)
    read = [Scrape.parse(generate_latest(metrics.registry).decode() + members, 0.0)]
    for phase, value in (("deliver", 0.004), ("verify", 0.008), ("overhead", 0.001), ("total", 0.01)):
        pair.round_seconds.labels(phase=phase).observe(value)
    pair.rounds.inc(10)
    pair.draft_tokens.inc(50)
    pair.accepted_tokens.inc(20)
    pair.plain_steps.labels(reason="does_not_pay").inc(10)
    pair.plain_steps.labels(reason="none_parked").inc(4)
    pair.emitted_tokens.labels(kind="accepted").inc(48)
    for latency in (metrics.time_to_first_token, metrics.inter_token):
        latency.labels("m").observe(0.2)
    metrics.lookups.labels(result="hit").inc(3)
    metrics.lookups.labels(result="miss").inc(1)
    read.append(Scrape.parse(generate_latest(metrics.registry).decode() + members, 2.0))
    said: dict[str, Any] = {"ready": bool(serving), "reason": None if serving else "no target", "refused": []}
    return SystemView(
        "http://gateway.example:8000", 5000.0 + (read[1].started_s or 0), ScrapeInterval(*read), said, workers
    )


def test_figures_are_of_the_span_and_every_line_has_at_most_80_columns() -> None:
    worker = WorkerMetrics("target")
    labels = {"model": 40 * "target", "device": "cuda:0", "dtype": "bfloat16", "path": "flash"}
    worker.info.labels(**labels).set(1)
    for name, value in (("slots", 64), ("slots_in_use", 61), ("kv_blocks", 20480), ("kv_blocks_in_use", 20111)):
        getattr(worker, name).set(value)
    before = Scrape.parse(generate_latest(worker.registry).decode(), 0.0)
    worker.busy_seconds.inc(2.5)  # of a step, too, that began before the interval
    worker.batch_size.observe(4)
    worker.batch_size.observe(5)
    worker.slots_waiting.set(3)
    view = system(
        1, **{"target-chat-0": ScrapeInterval(before, Scrape.parse(generate_latest(worker.registry).decode(), 2.0))}
    )
    text = drawn(view)
    for line in (
        "outrider http://gateway.example:8000  ready  up 1 h 23 min",
        "tokens/s 24.0  tokens per target pass 2.00",
        "first token p50 192.0 ms p95 249.6 ms  between tokens p50 192.0 ms p95 249.6 ms",
        "a round            10.0 ms",
        "held for drafts   4.0 ms  ██████████ 33 %",
        "verify            8.0 ms  ████████████████████ 67 %",
        "overhead          0.0 ms   0 %",
        "drafts lay ready 75 % of the steps",
        "! target-chat-0: 3 slots wait for KV blocks: raise kv_cache_tokens, or lower the load",
    ):
        assert line[:80] in text, text
    for figures in (("100 %", "61/64", "20111/20480", "1.0", "4.5"), ("40 %", "3.00", "5.0", "does_not_pay 5.0")):
        row = next(line for line in text.splitlines() if figures[0] in line and figures[1] in line)
        assert all(each in row for each in figures), row
    assert max(map(len, text.splitlines())) <= 80 and "idle" not in text
    assert "target-chat-0 chat target serving" in drawn(view, 160)


@pytest.mark.parametrize(
    ("ready", "groups", "away", "workers"),
    [
        ({"ready": True}, [{"targets": ["w:1"], "labels": {"member": "a"}}], None, ["a"]),
        ({"ready": True}, [{"targets": [each], "labels": {"member": each}} for each in BAD_ADDRESSES], None, []),
        ([1], [], "what answers there is no gateway", []),
        ({"ready": True, "refused": 5}, [], "what answers there is no gateway", []),
        ({"ready": True}, [{"targets": [1], "labels": {"member": "a"}}], "what answers there is no gateway", []),
        ({"ready": True}, 5, "what answers there is no gateway", []),
    ],
)
def test_replies_are_checked_before_they_are_shown(
    ready: object, groups: object, away: str | None, workers: list[str]
) -> None:
    said = {"/readyz": ready, "/sd": groups}

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.host in ("gateway", "w") and request.url.path in ("/metrics", *said)
        path = request.url.path
        return httpx.Response(200, text="") if path == "/metrics" else httpx.Response(200, json=said[path])

    async def read() -> SystemView:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            return await SystemReader(http, "http://gateway").read()

    view = asyncio.run(read())
    assert view.away == away and list(view.workers) == workers and drawn(view)
