"""Truncate: sent after rejections and stop strings, seen by both workers, and nobody waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.client import AsyncClient, Completion, Speculation
from tests.e2e.reference import assert_target_alone
from tests.message_relay import MessageRelay, kind_of
from tests.stack import DEMO_TARGET, Process, Stack, gateway_beside, read_metrics

WORKERS = ("draft", "target")


@pytest.fixture
def prompt(dev_prompts: list[str]) -> str:
    """Of the continuations of these texts, one with both rejected and accepted rounds all along."""
    return dev_prompts[16][-300:]


@pytest.fixture
def gateway(stack: Stack) -> Iterator[Process]:
    """With counters of its own; its workers are shared, so theirs are compared by what they grow."""
    with gateway_beside(stack) as started:
        yield started


def addresses(target: str, draft: str) -> list[str]:
    return ["--target", target, "--draft", draft, "--port", "0", "--grpc-port", "0"]


def worker_metrics(stack: Stack) -> dict[str, dict[str, float]]:
    infos = {"draft": stack.draft_info(), "target": stack.target_info()}
    return {name: read_metrics(f"http://{info.metrics_address}/metrics") for name, info in infos.items()}


class Truncates:
    """What the gateway says it sent, and what each worker says arrived since the start."""

    def __init__(self, stack: Stack, gateway: Process) -> None:
        self._stack = stack
        self._gateway = gateway
        self._before = worker_metrics(stack)

    def sent(self, worker: str, reason: str) -> float:
        name = f'spec_truncate_total{{reason="{reason}",worker="{worker}"}}'
        return read_metrics(f"http://{self._gateway.ready['http']}/metrics").get(name, 0.0)

    def arrived(self, worker: str, reason: str) -> float:
        return self._grown(worker, f'outrider_worker_truncates_total{{reason="{reason}",worker="{worker}"}}')

    def _grown(self, worker: str, name: str) -> float:
        return worker_metrics(self._stack)[worker].get(name, 0.0) - self._before[worker].get(name, 0.0)

    async def all_have_arrived(self, worker: str, reason: str) -> float:
        """They are one way: the last may still be on its way when the answer ends. Returns how many there were."""
        deadline_s = time.monotonic() + 20.0
        while (arrived := self.arrived(worker, reason)) != (sent := self.sent(worker, reason)):
            assert time.monotonic() < deadline_s, f"{worker}: {sent} {reason} sent, {arrived} arrived"
            await asyncio.sleep(0.05)
        return sent


async def generate(gateway: Process, prompt: str, **options: Any) -> Completion:
    async with AsyncClient(str(gateway.ready["grpc"])) as client:
        return await client.generate(prompt, **{"temperature": 0.0, "max_tokens": 200, "ignore_eos": True, **options})


async def test_rejections_are_truncated_on_both_workers(stack: Stack, gateway: Process, prompt: str) -> None:
    """What was dropped is freed before: by the target's own step, and by the Advance in front at the draft."""
    truncates = Truncates(stack, gateway)
    answer = await generate(gateway, prompt, speculation=Speculation(num_draft_tokens=24))
    assert answer.usage.num_accepted_tokens < answer.usage.num_draft_tokens
    for worker in WORKERS:
        num_rejected = await truncates.all_have_arrived(worker, "rejected")
        assert 0 < num_rejected <= answer.usage.num_rounds
        assert truncates.sent(worker, "stop") == 0


@asynccontextmanager
async def relayed(stack: Stack, hold_s: float | None) -> AsyncIterator[tuple[Process, MessageRelay, MessageRelay]]:
    """A gateway that reaches both workers through relays which hold every Truncate back; None: for ever."""

    def hold(item: Any) -> Sequence[float]:
        if kind_of(item) != "truncate":
            return (0.0,)
        return () if hold_s is None else (hold_s,)

    assert stack.draft is not None
    async with (
        MessageRelay(stack.target.address, hold) as target,
        MessageRelay(stack.draft.address, hold) as draft,
    ):
        direct = ["--target-for-draft", stack.target.address]
        started = await asyncio.to_thread(Process, "gateway", [*addresses(target.address, draft.address), *direct])
        try:
            yield started, target, draft
        finally:
            await asyncio.to_thread(started.stop)


async def test_late_truncates_cost_work_but_never_an_error(stack: Stack, prompt: str) -> None:
    """One that arrives in a later round crops what that round has cached: it is fed again, and nothing else happens."""
    async with relayed(stack, hold_s=0.03) as (gateway, target, _):
        answer = await generate(gateway, prompt, max_tokens=400)
        assert target.num_held > 20
    assert answer.usage.num_completion_tokens == 400
    ids = [token.id for token in answer.choices[0].tokens]
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (prompt, ids))
