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


async def test_rounds_without_a_rejection_send_none(stack: Stack, gateway: Process, prompt: str) -> None:
    truncates = Truncates(stack, gateway)
    await generate(gateway, prompt, speculation=False)
    for worker in WORKERS:
        for reason in ("rejected", "stop", "wasted"):
            assert await truncates.all_have_arrived(worker, reason) == 0


async def test_a_stop_string_inside_a_round_is_truncated_on_both_workers(
    stack: Stack, gateway: Process, prompt: str
) -> None:
    """The string is cut out of accepted guesses: some rounds must therefore lose tokens that were committed."""
    truncates = Truncates(stack, gateway)
    async with AsyncClient(str(gateway.ready["grpc"])) as client:
        rounds = [r async for r in client.stream(prompt, temperature=0.0, max_tokens=120, ignore_eos=True)]
    long_round = next(r for r in rounds[3:] if len(r.tokens) >= 4 and r.tokens[0].text.strip())
    before = "".join(r.text_delta for r in rounds[: rounds.index(long_round)])
    stop = before[-12:] + long_round.tokens[0].text
    assert stop not in before
    cut = await generate(gateway, prompt, max_tokens=120, stop=[stop])
    assert cut.choices[0].stop_reason == stop
    assert cut.text == before[:-12]
    for worker in WORKERS:
        assert await truncates.all_have_arrived(worker, "stop") == 1
        assert await truncates.all_have_arrived(worker, "rejected") > 0
    assert stack.target_info().num_kv_blocks_in_use == stack.draft_info().num_kv_blocks_in_use == 0


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


async def test_a_truncate_leaves_with_what_the_round_sends_anyway(stack: Stack, prompt: str) -> None:
    """Every Truncate to a draft is behind the Advance of its round, or before the Close that ends the answer. A target
    has one message a round at most: an Extend, where half the lease is used, and a Truncate, where tokens were dropped.
    """
    async with relayed(stack, hold_s=0.0) as (gateway, target, draft):
        answer = await generate(gateway, prompt)
    to_target, to_draft = ([[kind_of(item) for item in batch] for batch in relay.batches] for relay in (target, draft))
    for kinds in (to_target, to_draft):
        assert sum("truncate" in batch for batch in kinds) > 10
    for batch in to_draft:
        for before, item, after in zip(["", *batch], batch, [*batch[1:], ""], strict=False):
            assert item != "truncate" or before == "advance" or after == "close", batch
    num_rounds = answer.usage.num_rounds + answer.usage.num_plain_steps
    assert sum(batch.count("advance") for batch in to_draft) >= answer.usage.num_rounds - 1
    num_extends = sum(batch.count("extend") for batch in to_target)
    assert 1 <= num_extends < num_rounds
    for kinds in (to_target, to_draft):
        assert len(kinds) <= num_rounds + 3  # an open, the lease's begin and a close besides


async def test_rounds_do_not_need_truncates(stack: Stack, prompt: str) -> None:
    async with relayed(stack, hold_s=None) as (gateway, target, draft):
        answer = await generate(gateway, prompt)
        assert target.num_held > 10
        assert draft.num_held > 10
        again = await generate(gateway, prompt)
    ids = [token.id for token in answer.choices[0].tokens]
    assert [token.id for token in again.choices[0].tokens] == ids
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (prompt, ids))


async def test_late_truncates_cost_work_but_never_an_error(stack: Stack, prompt: str) -> None:
    """One that arrives in a later round crops what that round has cached: it is fed again, and nothing else happens."""
    async with relayed(stack, hold_s=0.03) as (gateway, target, _):
        answer = await generate(gateway, prompt, max_tokens=400)
        assert target.num_held > 20
    assert answer.usage.num_completion_tokens == 400
    ids = [token.id for token in answer.choices[0].tokens]
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (prompt, ids))
