"""The gateway's series against a count made by a client from the rounds of Generate: equal, not close."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from outrider.client import AsyncClient, Round, Speculation
from outrider.wire.telemetry.metrics import PLAIN_REASONS
from tests.samples import total
from tests.stack import Process, Stack, gateway_beside, read_metrics

WINDOW_S = 60.0


@pytest.fixture(scope="module")
def fresh(stack: Stack) -> Iterator[Process]:
    """A gateway of its own, so that its window and its counters hold this module's run only."""
    with gateway_beside(stack) as gateway:
        yield gateway


def metrics_of(gateway: Process) -> dict[str, float]:
    return read_metrics(f"http://{gateway.ready['http']}/metrics")


def acceptance_rate(samples: dict[str, float]) -> float:
    (rate,) = (value for name, value in samples.items() if name.startswith("spec_acceptance_rate{"))
    return rate


async def run_mixed(gateway: Process, prompts: list[str]) -> list[Round]:
    """Every round of twelve answers: greedy and sampled, K from 1 to 8, without drafts, two answers, a stop string."""
    wishes = [
        {"temperature": 0.0},
        {"temperature": 0.0, "speculation": Speculation(num_draft_tokens=8)},
        {"temperature": 0.0, "speculation": Speculation(num_draft_tokens=1)},
        {"temperature": 0.0, "speculation": False},
        {"temperature": 0.0, "stop": ["self"]},
        {"temperature": 0.8, "n": 2},
        {"temperature": 0.8, "top_k": 40, "speculation": Speculation(num_draft_tokens=3)},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "stop": [")\n"]},
        {"temperature": 1.0, "min_p": 0.05, "stop_token_ids": [202]},
        {"temperature": 0.6, "max_tokens": 1},
        {"temperature": 0.6, "max_tokens": 2},
    ]
    async with AsyncClient(str(gateway.ready["grpc"])) as client:

        async def rounds_of(index: int) -> list[Round]:
            options = {"max_tokens": 48, **wishes[index]}
            return [each async for each in client.stream(prompts[index][-300:], **options)]

        answers = await asyncio.gather(*(rounds_of(index) for index in range(len(wishes))))
    return [each for answer in answers for each in answer]


async def test_every_counter_equals_the_clients_own_count(fresh: Process, dev_prompts: list[str]) -> None:
    before, started_s = metrics_of(fresh), time.monotonic()
    rounds = await run_mixed(fresh, dev_prompts)
    after = metrics_of(fresh)
    assert time.monotonic() - started_s < WINDOW_S, "the machine is too slow to say what the gauge must be"
    drafted, accepted = sum(r.num_drafted for r in rounds), sum(r.num_accepted for r in rounds)
    assert drafted > 300
    assert 0 < accepted < drafted
    assert acceptance_rate(after) == accepted / drafted

    speculative = [r for r in rounds if r.num_drafted]
    expected = {
        ("spec_draft_tokens_total", "", ""): drafted,
        ("spec_accepted_tokens_total", "", ""): accepted,
        ("spec_rounds_total", "", ""): len(speculative),
        ("spec_wasted_tokens_total", "", ""): sum(r.usage.num_wasted_tokens for r in rounds if r.usage is not None),
        ("spec_accepted_length_count", "", ""): len(speculative),
        ("spec_accepted_length_sum", "", ""): sum(len(r.tokens) for r in speculative),
        ("spec_round_seconds_count", "phase", "total"): len(speculative),
        ("outrider_requests_total", "outcome", "ok"): sum(r.usage is not None for r in rounds),
        ("vllm:spec_decode_num_drafts_total", "", ""): len(speculative),
        ("vllm:spec_decode_num_draft_tokens_total", "", ""): drafted,
        ("vllm:spec_decode_num_accepted_tokens_total", "", ""): accepted,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "", ""): accepted,
        ("vllm:generation_tokens_total", "", ""): sum(len(r.tokens) for r in rounds),
    }
    num_plain = len(rounds) - len(speculative)
    assert grown(before, after, "spec_plain_steps_total", "", "") == num_plain
    reasons = {reason: grown(before, after, "spec_plain_steps_total", "reason", reason) for reason in PLAIN_REASONS}
    assert sum(reasons.values()) == num_plain
    assert reasons["off"] >= 48 / 2, "one answer asked for no drafts"
    assert reasons["end"] > 0, "the last token of an answer has no room for a draft"
    assert reasons["no_draft"] == reasons["refused"] == reasons["nothing"] == 0
    hits = {result: grown(before, after, "spec_lookup_total", "result", result) for result in ("hit", "miss")}
    assert hits["hit"] > 0 and sum(hits.values()) <= len(rounds)
    assert sum(hits.values()) <= grown(before, after, "spec_hold_seconds_count", "", "") < len(rounds), (
        "not those of off"
    )
    kinds = Counter(token.kind.value for r in rounds for token in r.tokens)
    assert set(kinds) == {"accepted", "recovered", "bonus", "plain"}
    expected |= {("spec_emitted_tokens_total", "kind", kind): count for kind, count in kinds.items()}
    expected |= by_position("drafted", [r.num_drafted for r in rounds])
    expected |= by_position("accepted", [r.num_accepted for r in rounds])
    lengths = [len(r.tokens) for r in speculative]
    for edge in (*range(1, 18), 33, 65):
        expected["spec_accepted_length_bucket", "le", f"{edge:.1f}"] = sum(length <= edge for length in lengths)
    assert {series: grown(before, after, *series) for series in expected} == expected

    usages = [r.usage for r in rounds if r.usage is not None]
    num_cached = sum(usage.num_cached_prompt_tokens for usage in usages)
    assert grown(before, after, "vllm:prefix_cache_hits_total", "", "") == num_cached
    assert sum(usage.num_draft_tokens for usage in usages) == drafted
    assert sum(usage.num_accepted_tokens for usage in usages) == accepted
    assert sum(usage.num_rounds for usage in usages) == len(speculative)
    assert sum(usage.num_plain_steps for usage in usages) == len(rounds) - len(speculative)
    assert sum(usage.num_completion_tokens for usage in usages) == sum(kinds.values())


def grown(before: dict[str, float], after: dict[str, float], name: str, label: str, value: str) -> float:
    """Over all pairs, of which there is one."""
    labels = {label: value} if label else {}
    return total(after, name, **labels) - total(before, name, **labels)


def by_position(name: str, counts: list[int]) -> dict[tuple[str, str, str], float]:
    """One sample for each position that any round reached."""
    return {
        (f"spec_{name}_per_position_total", "position", str(position)): sum(count > position for count in counts)
        for position in range(max(counts))
    }
