"""Workers that die, hang or lie in the middle of streams: no token changes, and drafts come back."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client import AcceptanceRule, AsyncClient, Drafter, FinishReason, Round, Speculation, TokenKind
from outrider.wire.models.model_id import short_name
from outrider.wire.processes.health import FIRST_PAUSE_S
from outrider.wire.transport.hang_watch import MIN_SILENCE_S
from target_service.leases.hold import MAX_HOLD_S
from tests.e2e.faults import lying_draft
from tests.e2e.reference import assert_target_alone
from tests.e2e.streams import PROMPT, Seen, greedy, plain, read_all, speculative
from tests.samples import total
from tests.stack import DEMO_TARGET, Process, Stack, gateway_beside, info_of, read_metrics, running

MAX_WAIT_S = MAX_HOLD_S
"""The longest that a target waits for drafts that a request names."""
RETURNS = re.compile("p?(sp)+s")
"""Drafts, plain rounds without the draft, drafts again. A busy machine may add a late proposal before or after."""
COUPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 120, "ignore_eos": True}
SETTLED_ROUNDS = 12
"""Plain ones: more than a request makes after three late proposals before it asks for the next."""
SLACK_S = 1.5
"""What a busy machine may add to a round."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A target that takes 30 ms longer a step, so that streams outlive a restart. Its draft is drafted for."""
    embeddings, by = ("--lookahead-embeddings", str(Path(DEMO_TARGET).parent / "pass")), ("--drafted-by", "ngram")
    with running(target_module="tests.e2e.faults.paced_target", target_args=embeddings, draft_args=by) as stack:
        yield stack


def restart(stack: Stack, name: str) -> None:
    """A new life at the address of the old one."""
    old: Process = getattr(stack, name)
    setattr(stack, name, old.again())


def has_right_and_wrong_guesses(draft: Process) -> bool:
    """Whether the draft's own drafter guessed tokens that the draft then drew, and tokens that it did not."""
    counts = read_metrics(f"http://{draft.ready['metrics_address']}/metrics")
    return all(total(counts, "outrider_worker_guessed_tokens_total", fate=fate) for fate in ("drawn", "dropped"))


async def test_a_killed_draft_changes_no_token_and_its_successor_drafts(stack: Stack, client: AsyncClient) -> None:
    seen = Seen()
    assert stack.draft is not None
    async with greedy(client, 1900) as stream:
        await seen.read(stream, speculative(5))
        while not has_right_and_wrong_guesses(stack.draft):
            await seen.read(stream, speculative(1))
        stack.draft.kill()
        await seen.read(stream, plain(10))
        assert total(stack.metrics(), "outrider_worker_connected", worker="draft") == 0
        before = stack.draft.ready["epoch"]
        await asyncio.to_thread(restart, stack, "draft")
        assert stack.draft.ready["epoch"] != before
        await seen.read(stream, speculative(10))
    assert RETURNS.fullmatch(seen.phases), seen.phases
    assert all(token.kind is TokenKind.PLAIN for r in seen.rounds if not r.num_drafted for token in r.tokens)
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (PROMPT, seen.ids))


@pytest.mark.parametrize("hang_s", [3.0, pytest.param(15.0, marks=pytest.mark.slow)])
async def test_a_draft_that_hangs_costs_each_request_one_wait(stack: Stack, client: AsyncClient, hang_s: float) -> None:
    """Three seconds may be those of a process that gets no CPU: its connection stands. Of fifteen another is made."""
    streams = [greedy(client, 1900) for _ in range(3)]
    seen = [Seen() for _ in streams]
    assert stack.draft is not None

    await read_all(seen, streams, speculative(5))
    os.kill(stack.draft.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    await read_all(seen, streams, plain(SETTLED_ROUNDS))
    await read_all(seen, streams, lambda rounds: time.monotonic() - stopped_s > hang_s)
    samples = stack.metrics()
    assert total(samples, "outrider_worker_connected", worker="draft") == (hang_s < MIN_SILENCE_S)
    os.kill(stack.draft.pid, signal.SIGCONT)
    await read_all(seen, streams, speculative(10))
    for stream in streams:
        await stream.aclose()
    for one in seen:
        assert RETURNS.fullmatch(one.phases), one.phases
        waits = [
            b - a for a, b in zip(one.times_s, one.times_s[1:], strict=False) if stopped_s < b < stopped_s + hang_s
        ]
        assert max(waits) < MAX_WAIT_S + SLACK_S
        assert sum(wait > MAX_WAIT_S / 2 for wait in waits) <= 2, "nobody waits for it again"
        assert len(waits) > hang_s / 0.2  # and the other rounds go at the pace of plain steps
    outputs = [(PROMPT, one.ids) for one in seen]
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, *outputs)


async def test_a_target_killed_in_the_middle_neither_repeats_nor_loses_a_token(
    stack: Stack, client: AsyncClient
) -> None:
    streams = [greedy(client, 160) for _ in range(3)]
    seen = [Seen() for _ in streams]

    await read_all(seen, streams, speculative(5))
    stack.target.kill()
    restarting = asyncio.create_task(asyncio.to_thread(restart, stack, "target"))
    await read_all(seen, streams, lambda rounds: False)
    await restarting
    for one in seen:
        assert len(one.ids) == 160
        assert one.rounds[-1].finish_reason is FinishReason.LENGTH
        assert one.rounds[-1].num_drafted or one.rounds[-2].num_drafted  # drafts go to the new target
        assert max(b - a for a, b in zip(one.times_s, one.times_s[1:], strict=False)) > 0.5  # it was away
    outputs = [(PROMPT, one.ids) for one in seen]
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, *outputs)


@pytest.mark.slow
async def test_own_drafts_change_no_token_though_both_workers_are_killed(stack: Stack, client: AsyncClient) -> None:
    """Windows, n-grams and what look-ahead embeddings said go with the target, and are made anew."""
    drafters, wish = (Drafter.LOOKAHEAD, Drafter.PASS, Drafter.LOOKAHEAD_MODEL), AcceptanceRule.COUPLED
    streams = [greedy(client, COUPLED["max_tokens"], drafter) for drafter in drafters]
    streams += [
        client.stream(PROMPT, speculation=Speculation(drafter=drafter, acceptance=wish), **COUPLED)
        for drafter in drafters
    ]
    seen = [Seen() for _ in streams]

    await read_all(seen, streams, lambda rounds: sum(r.num_drafted > 0 for r in rounds) > 2)
    num_before = [len(one.rounds) for one in seen]
    for worker in (stack.target, stack.draft):
        assert worker is not None
        worker.kill()
    restarting = [asyncio.create_task(asyncio.to_thread(restart, stack, name)) for name in ("target", "draft")]
    await read_all(seen, streams, lambda rounds: False)
    await asyncio.gather(*restarting)
    for one, num in zip(seen, num_before, strict=True):
        assert any(r.num_drafted for r in one.rounds[num:]), "it drafts again"
        assert any(r.num_accepted for r in one.rounds)
        assert max(b - a for a, b in zip(one.times_s, one.times_s[1:], strict=False)) > 0.5, "they were away"
    alone = await client.generate(PROMPT, speculation=Speculation(enabled=False, acceptance=wish), **COUPLED)
    texts = [one.ids for one in seen]
    assert texts[3:] == [[token.id for token in alone.choices[0].tokens]] * 3
    assert [len(ids) for ids in texts[:3]] == [COUPLED["max_tokens"]] * 3
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, *((PROMPT, ids) for ids in texts[:3]))


async def test_either_of_two_drafts_of_one_tree_may_be_killed(stack: Stack) -> None:
    """A model, and a head that reads the target's hidden states, of a pool of its own."""
    folder = str(Path(DEMO_TARGET).parent / "eagle3")
    assert stack.draft is not None
    head = Process("draft_service", ["--model", folder, "--target-model", DEMO_TARGET])
    with gateway_beside(stack, "--draft", f"{stack.draft.address};{head.address}") as gateway:
        both = Stack(stack.target, stack.draft, gateway)
        models = [short_name(info_of(draft).model_id) for draft in (stack.draft, head)]

        def counted() -> list[float]:
            return [total(both.metrics(), "spec_draft_tokens_total", draft=model) for model in models]

        def both_draft_since(before: list[float]) -> Callable[[list[Round]], bool]:
            return lambda rounds: all(now > then for now, then in zip(counted(), before, strict=True))

        wish = Speculation(drafter=Drafter.MODEL_AND_MODEL, acceptance=AcceptanceRule.COUPLED)
        async with AsyncClient(both.grpc) as client:
            streams = [
                greedy(client, 900, Drafter.MODEL_AND_MODEL),
                client.stream(PROMPT, speculation=wish, **{**COUPLED, "max_tokens": 900}),
            ]
            seen = [Seen() for _ in streams]

            await read_all(seen, streams, both_draft_since([0.0, 0.0]))
            for victim in (stack.draft, head):
                await asyncio.to_thread(victim.kill)
                await read_all(seen, streams, lambda rounds: sum(r.num_drafted > 0 for r in rounds) > 4)
                again = await asyncio.to_thread(victim.again)
                stack.draft, head = (again, head) if victim is stack.draft else (stack.draft, again)
                await read_all(seen, streams, both_draft_since(counted()))
            for stream in streams:
                await stream.aclose()
            alone = await client.generate(
                PROMPT,
                speculation=Speculation(enabled=False, acceptance=AcceptanceRule.COUPLED),
                **{**COUPLED, "max_tokens": len(seen[1].ids)},
            )
    head.stop()
    assert seen[1].ids == [token.id for token in alone.choices[0].tokens]
    await asyncio.to_thread(assert_target_alone, DEMO_TARGET, (PROMPT, seen[0].ids))


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(draft_module="tests.e2e.faults.lying_draft", log_folder=tmp_path_factory.mktemp("lies")) as stack:
        yield stack


@pytest.fixture
def lied_to(liar: Stack) -> Iterator[Stack]:
    """A gateway that has not heard a lie yet."""
    with gateway_beside(liar) as gateway:
        yield Stack(liar.target, liar.draft, gateway)


def num_refused(stack: Stack) -> float:
    return stack.metrics()["spec_proposals_refused_total"]


@pytest.mark.parametrize(
    ("temperature", "lies"), [(0.0, lying_draft.OF_IDS), (0.8, lying_draft.OF_LAWS)], ids=["ids", "laws"]
)
async def test_a_draft_that_lies_is_refused_counted_and_changes_nothing(
    lied_to: Stack, temperature: float, lies: dict[object, str]
) -> None:
    """Every round is then a plain step, so that the text is that of plain decoding at any temperature. And it is left
    alone: after three refusals in a row it is asked once in a while.
    """
    started_s, seed, num_wasted = time.monotonic(), 0, 0
    length = len(lied_to.target.log())

    def refusals() -> list[str]:
        return [
            line
            for line in lied_to.target.log()[length:].splitlines()
            if "refused a delivery" in line or "refused drafts" in line
        ]

    async with AsyncClient(lied_to.grpc) as client:
        while not all(any(lie in line for line in refusals()) for lie in lies.values()):
            assert time.monotonic() - started_s < 20.0, f"not all of {lies.values()} in {refusals()}"
            options = {"max_tokens": 40, "temperature": temperature, "seed": seed, "ignore_eos": True}
            told = await client.generate(PROMPT, **options)
            alone = await client.generate(PROMPT, **options, speculation=False)
            assert [token.id for token in told.choices[0].tokens] == [token.id for token in alone.choices[0].tokens]
            assert told.usage.num_draft_tokens == told.usage.num_rounds == 0
            assert told.usage.num_plain_steps == told.usage.num_completion_tokens == 40
            num_wasted, seed = num_wasted + told.usage.num_wasted_tokens, seed + 1
        before, asked_s = num_refused(lied_to), time.monotonic()
        for _ in range(4):
            told = await client.generate(PROMPT, max_tokens=40, temperature=temperature, ignore_eos=True)
            num_wasted += told.usage.num_wasted_tokens
        assert num_refused(lied_to) - before <= 1 + (time.monotonic() - asked_s) / FIRST_PAUSE_S
    after = lied_to.metrics()
    assert 0 < num_refused(lied_to) <= len(refusals()), "a step counts once, whatever came for it"
    assert total(after, "spec_wasted_tokens_total") == num_wasted
    assert num_wasted <= (3 if lies is lying_draft.OF_LAWS else 0), "laws that come too late are counted and not read"
    assert total(after, "spec_draft_tokens_total") == 0
    assert total(after, "outrider_breaker_open", member="draft-0") == 1
