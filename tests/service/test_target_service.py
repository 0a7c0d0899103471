"""The target over real gRPC: what verdicts hold, what repeated and stale requests get, and that nothing leaks."""

import asyncio
import dataclasses
import math
from typing import Any

import pytest
import torch

from outrider.engine.speculation.draft_tree import DraftTree
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.protocol import PROTOCOL
from outrider.wire.requests.params import BeamParams
from outrider.wire.requests.speculation import AUTO, Speculation
from outrider.wire.requests.tree_shape import TreeShape
from tests.service.control_client import (
    ControlClient,
    delivery,
    drafted,
    eventually,
    idle,
    new_ticket,
    open_slot,
    sampling,
    verify,
)
from tests.service.reference_model import ReferenceModel, draw
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

ACCEPTED, RECOVERED = pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_RECOVERED
BONUS, PLAIN = pb.TOKEN_KIND_BONUS, pb.TOKEN_KIND_PLAIN
PROMPT = (12, 7, 99, 4, 31)
VOCAB = 320


def other_than(token: int) -> int:
    return (token + 5) % VOCAB


async def verdict_with(
    client: ControlClient,
    slot: int,
    ids: list[int],
    drafts: list[int],
    log_probs: torch.Tensor | None = None,
    *,
    sparse: bool = False,
) -> tpb.Verdict:
    """One step, over drafts that come while it is held for them."""
    ticket = new_ticket()
    item = delivery(client, ticket, len(ids), drafts, log_probs, sparse=sparse, ends=[len(drafts) - 1])
    verdict = await drafted(client, verify(slot, 0, ids, ticket), item)
    assert isinstance(verdict, tpb.Verdict), verdict
    assert verdict.fallback == tpb.FALLBACK_REASON_UNSPECIFIED
    return verdict


# what a verdict holds


async def test_plain_steps_are_the_target_alone(target: ControlClient, reference: ReferenceModel) -> None:
    await target.opened(1, PROMPT)
    ids, expected = list(PROMPT), reference.greedy(PROMPT, 12)
    new: list[int] = []
    for step in range(12):
        verdict = await target.ask(verify(1, len(ids), new))
        if step:  # the first may feed the prompt as well
            assert verdict.num_batch_tokens == 1
        ids, new = [*ids, *new], list(verdict.token_ids)
        assert verdict.committed_len == len(ids)
        assert list(verdict.kinds) == [PLAIN]
        assert (verdict.num_drafted, verdict.num_accepted, verdict.finish_reason) == (0, 0, 0)
        assert not verdict.logprobs
        assert verdict.batch_size == 1 and verdict.forward_us > 0
    assert [*ids, *new][len(PROMPT) :] == expected


@pytest.mark.parametrize("wrong_at", range(5))
async def test_greedy_proposal(target: ControlClient, reference: ReferenceModel, wrong_at: int) -> None:
    """Drafts are kept up to the first that is not the target's own; position 4 is past the four drafts."""
    expected = reference.greedy(PROMPT, 5)
    drafts = [other_than(token) if j == wrong_at else token for j, token in enumerate(expected[:4])]
    await target.opened(1, PROMPT, k=4)
    verdict = await verdict_with(target, 1, list(PROMPT), drafts)
    assert list(verdict.token_ids) == expected[: wrong_at + 1]
    assert list(verdict.kinds) == [ACCEPTED] * wrong_at + [RECOVERED if wrong_at < 4 else BONUS]
    assert (verdict.num_drafted, verdict.num_accepted) == (4, wrong_at)
    # The slot goes on from there with the target's own next token.
    committed = [*PROMPT, *verdict.token_ids]
    after = await target.ask(verify(1, len(committed)))
    assert list(after.token_ids) == reference.greedy(committed, 1)


@pytest.mark.parametrize("sparse", [False, True], ids=["full", "sparse"])
async def test_sampled_proposals_follow_algorithm_1(
    target: ControlClient, reference: ReferenceModel, sparse: bool
) -> None:
    """Drafts from a blurred copy of the target's own law, so that some are kept and some are not."""
    kept = rejected = bonus = 0
    for seed in range(8):
        params = sampling(temperature=1.0, seed=seed, max_tokens=64)
        await target.opened(seed, PROMPT, k=3, temperature=1.0, seed=seed, max_tokens=64)
        ids = list(PROMPT)
        for _ in range(3):
            drafts, laws = blurred_drafts(reference, ids, params, count=3, top=60 if sparse else VOCAB)
            verdict = await verdict_with(target, seed, ids, drafts, laws, sparse=sparse)
            num_accepted, tokens = reference.verdict(ids, len(PROMPT), params, drafts, laws)
            assert (verdict.num_accepted, list(verdict.token_ids)) == (num_accepted, tokens)
            last = BONUS if num_accepted == 3 else RECOVERED
            assert list(verdict.kinds) == [ACCEPTED] * num_accepted + [last]
            kept, rejected, bonus = kept + num_accepted, rejected + (last == RECOVERED), bonus + (last == BONUS)
            ids += verdict.token_ids
        target.tell(pb.CloseSlot(slot=seed))
    assert kept > 0 and rejected > 0 and bonus > 0, "the drafts do not exercise the rule"


def blurred_drafts(
    reference: ReferenceModel, ids: list[int], params: Any, count: int, top: int
) -> tuple[list[int], torch.Tensor]:
    """(drafts, [count, V] float32 log-probs they were drawn from, cut to the `top` best)."""
    drafts: list[int] = []
    rows = []
    generator = torch.Generator().manual_seed(params.seed * 1000 + len(ids))
    for _ in range(count):
        law = reference.laws(ids, len(PROMPT), params, drafts)[-1]
        blurred = law + 0.3 * torch.randn(VOCAB, generator=generator)
        kept = blurred.masked_fill(blurred < blurred.topk(top).values[-1], -torch.inf).log_softmax(0)
        drafts.append(draw(kept, float(torch.rand(1, generator=generator))))
        rows.append(kept)
    return drafts, torch.stack(rows)


EXPLAINED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "rejection": {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.2},
    "coupled": {"temperature": 0.9, "acceptance": AcceptanceRule.COUPLED},
}


@pytest.mark.parametrize("shape", [None, TreeShape((2, 1))], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", EXPLAINED)
async def test_an_explanation_changes_nothing_and_comes_to_those_who_ask(
    target: ControlClient, reference: ReferenceModel, rule: str, shape: TreeShape | None
) -> None:
    """The same drafts for two slots, of which one asks: both say the same, and it what the laws were."""
    parents, ranks = ([-1, 0, 1], [0, 0, 0]) if shape is None else ([-1, -1, 0, 1], [0, 1, 0, 0])
    drawn, num_refused, num_explained = rule == "rejection", 0, 0
    for seed in range(3):
        options: dict[str, Any] = {**EXPLAINED[rule], "seed": seed, "max_tokens": 64}
        params, ids = sampling(**options), list(PROMPT)
        speculation = Speculation(3 if shape is None else AUTO, 8, shape)
        for slot in (1, 2):
            asked = dataclasses.replace(speculation, explain=slot == 2)
            await target.opened(slot, PROMPT, speculation=asked, **options)
        for _ in range(2):
            first = reference.laws(ids, len(PROMPT), params, [])[0]
            law = (first + torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))).log_softmax(0)
            best = law.argsort(descending=True).tolist()
            drafts = [best[0], *(best[place] for place in range(1, len(parents)))]
            laws = law.expand(len(set(parents)), VOCAB) if drawn else None
            said = list[tpb.Verdict]()
            for slot in (1, 2):
                ticket, ends = new_ticket(), [-1, *range(len(drafts))]
                tree = {"parents": parents, "ranks": ranks, "ends": ends}
                item = delivery(target, ticket, len(ids), drafts, laws, **tree)
                item.draft_us = 70
                said.append(await drafted(target, verify(slot, 0, ids, ticket), item))
            plain, told = said
            assert not plain.HasField("explanation")
            for name in ("token_ids", "kinds", "num_drafted", "num_accepted", "drafter", "finish_reason"):
                assert getattr(plain, name) == getattr(told, name)
            found = told.explanation
            paths = DraftTree.of([each.id for each in found.draft], [each.parent for each in found.draft])
            sent = DraftTree.of(drafts, parents)
            assert {paths.prefix(node) for node in range(len(drafts))} == {*map(sent.prefix, range(len(drafts)))}
            assert found.draft_us == 70
            kind = pb.DRAFT_TOKEN_KIND_SAMPLED if drawn else pb.DRAFT_TOKEN_KIND_DETERMINISTIC
            assert {token.kind for token in found.draft} == {kind}
            kept = [token.id for token in found.draft if token.is_accepted]
            assert kept == list(told.token_ids)[:-1] and len(kept) == told.num_accepted
            num_explained += 1
            if told.kinds[-1] == RECOVERED:
                num_refused += 1
                rejection = found.rejection
                assert rejection.token.id == told.token_ids[-1]
                asked_params = dataclasses.replace(params, temperature=params.temperature or 1.0)
                there = reference.laws(ids, len(PROMPT), asked_params, kept)[-1]
                assert [token.id for token in rejection.target] == there.argsort(descending=True)[:5].tolist()
                logprobs = there.sort(descending=True).values[:5].tolist()
                assert [token.logprob for token in rejection.target] == pytest.approx(logprobs, abs=1e-3)
                assert [token.id for token in rejection.draft_distribution] == (best[:5] if drawn else [])
                assert bool(rejection.deterministic_tokens) is not drawn
            ids += told.token_ids
        for slot in (1, 2):
            target.tell(pb.CloseSlot(slot=slot))
    assert num_refused > 0 and num_explained == 6


# log-probs


async def test_logprobs_are_the_unmodified_models(target: ControlClient, reference: ReferenceModel) -> None:
    options: dict[str, Any] = {"temperature": 0.5, "repetition_penalty": 2.0, "seed": 3}
    expected = reference.greedy(PROMPT, 4)
    await target.opened(1, PROMPT, k=3, num_logprobs=3)
    await target.opened(2, PROMPT, num_logprobs=0, **options)
    verified = await verdict_with(target, 1, list(PROMPT), expected[:3])
    plain = await target.ask(verify(2, 0, PROMPT))
    raw = reference.logits([*PROMPT, *expected[:3]]).log_softmax(dim=1)[len(PROMPT) - 1 :]  # [4, V]
    assert len(verified.logprobs) == 4
    for row, token, got in zip(raw, expected, verified.logprobs, strict=True):
        assert math.isclose(got.logprob, float(row[token]), abs_tol=1e-4)
        assert list(got.top_ids) == row.topk(3).indices.tolist()
        assert got.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert len(plain.logprobs) == 1 and not plain.logprobs[0].top_ids
    assert math.isclose(plain.logprobs[0].logprob, float(raw[0][plain.token_ids[0]]), abs_tol=1e-4)


# repeated, stale and wrong requests


async def test_a_verify_repeated_after_its_verdict(target: ControlClient, reference: ReferenceModel) -> None:
    """Its drafts are spent: a plain step, of the same tokens; the slot is as long as that says."""
    expected = reference.greedy(PROMPT, 4)
    await target.opened(1, PROMPT, k=3)
    ticket = new_ticket()
    message = verify(1, len(PROMPT), ticket=ticket)
    first = await drafted(target, message, delivery(target, ticket, len(PROMPT), expected[:3]))
    second = await target.ask_at_once(message)
    assert list(first.token_ids) == expected
    assert list(second.token_ids) == expected[:1]
    assert (second.num_drafted, second.fallback) == (0, tpb.FALLBACK_REASON_LATE)
    third = await target.ask(verify(1, len(PROMPT), expected))
    assert list(third.token_ids) == reference.greedy([*PROMPT, *expected], 1)


async def test_stale_epoch(target: ControlClient) -> None:
    old = target.epoch ^ 2
    before = await target.metrics()
    for item in (open_slot(1, PROMPT), verify(1, 5)):
        error = await target.ask(item, epoch=old)
        assert error.code == pb.WORKER_ERROR_CODE_STALE_EPOCH
        assert str(old) in error.message and str(target.epoch) in error.message
    await target.opened(1, PROMPT)
    for one_way in (pb.CloseSlot(slot=1), pb.Truncate(slot=1, committed_len=1)):
        target.tell(one_way, epoch=old)
    assert isinstance(await target.ask(verify(1, len(PROMPT))), tpb.Verdict), "a stale close closed the slot"
    assert truncates(await target.metrics()) == truncates(before)


def truncates(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("outrider_worker_truncates_total"))


@pytest.mark.parametrize(
    "item, named",
    [
        (verify(1, 0, [*PROMPT, VOCAB]), str(VOCAB)),
        (verify(1, 0, PROMPT[:-1]), "4 tokens"),
        (verify(1, 0, []), "0 tokens"),
        (verify(1, 5, [3] * 32), "37 tokens"),
        (verify(1, 5, num_steps=0), "lease_end_len is 5, must be more than the 5 tokens committed"),
        (None, "no item"),
    ],
    ids=["id out of range", "part of the prompt", "nothing", "past max_tokens", "no step", "no item"],
)
async def test_invalid_requests_leave_the_slot_as_it_was(
    target: ControlClient, reference: ReferenceModel, item: tpb.Verify | None, named: str
) -> None:
    await target.opened(1, PROMPT)
    error = await target.ask_at_once(item)
    assert error.code == pb.WORKER_ERROR_CODE_INVALID
    assert named in error.message
    verdict = await target.ask(verify(1, len(PROMPT)))
    assert list(verdict.token_ids) == reference.greedy(PROMPT, 1)


# opening, and what is refused before work starts


def of_an_unknown_rule() -> pb.OpenSlot:
    message = open_slot(1, PROMPT)
    message.params.acceptance = 9  # type: ignore[assignment]
    return message


@pytest.mark.parametrize(
    "message, code, named",
    [
        (open_slot(1, []), pb.WORKER_ERROR_CODE_INVALID, "num_prompt_tokens is 0"),
        (open_slot(1, PROMPT, num_prompt=6), pb.WORKER_ERROR_CODE_INVALID, "num_prompt_tokens is 6"),
        (open_slot(1, [1, 320]), pb.WORKER_ERROR_CODE_INVALID, "320"),
        (open_slot(1, PROMPT, temperature=math.nan), pb.WORKER_ERROR_CODE_INVALID, "temperature is nan"),
        (of_an_unknown_rule(), pb.WORKER_ERROR_CODE_INVALID, "acceptance is 9"),
        (open_slot(1, PROMPT, max_tokens=252), pb.WORKER_ERROR_CODE_INVALID, "256"),
        (pb.OpenSlot(protocol=PROTOCOL), pb.WORKER_ERROR_CODE_INVALID, "max_tokens is 0"),
        (pb.OpenSlot(), pb.WORKER_ERROR_CODE_INVALID, "the gateway speaks protocol 0, this worker"),
        (
            open_slot(1, PROMPT, speculation=Speculation(num_draft_tokens=5, max_draft_tokens=4)),
            pb.WORKER_ERROR_CODE_INVALID,
            "num_draft_tokens is 5, must be from 0 to 4",
        ),
        (
            open_slot(1, PROMPT, speculation=Speculation(tree=TreeShape((2, 2)), max_draft_tokens=4)),
            pb.WORKER_ERROR_CODE_INVALID,
            "nodes of tree is 6",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_opens_are_refused_by_name(target: ControlClient, message: Any, code: Any, named: str) -> None:
    error = await target.ask(message)
    assert error.code == code and named in error.message
    assert idle(await target.info())


async def test_close_cancels_and_forgets(target: ControlClient) -> None:
    await target.opened(1, PROMPT, k=2)
    waiting = target.start(verify(1, len(PROMPT), ticket=new_ticket()))
    target.tell(pb.CloseSlot(slot=1))
    target.tell(pb.CloseSlot(slot=1))
    target.tell(pb.CloseSlot(slot=1234))
    assert (await asyncio.wait_for(waiting, 30)).code == pb.WORKER_ERROR_CODE_CANCELLED
    assert idle(await target.info())
    assert (await target.ask(verify(1, len(PROMPT)))).code == pb.WORKER_ERROR_CODE_UNKNOWN_SLOT


# truncation


async def test_a_verdict_frees_what_it_rejects(target: ControlClient, reference: ReferenceModel) -> None:
    """14 committed, 8 drafts: 22 entries in two blocks; all rejected, one block is enough. Truncates change nothing."""
    prompt = list(range(20, 34))
    await target.opened(1, prompt, k=8)
    wrong = [other_than(token) for token in reference.greedy(prompt, 1)] + [3] * 7
    before = await target.metrics()
    verdict = await verdict_with(target, 1, prompt, wrong)
    assert (verdict.num_drafted, verdict.num_accepted) == (8, 0)
    assert (await target.info()).num_kv_blocks_in_use == 1
    message = pb.Truncate(slot=1, committed_len=15, reason=pb.TRUNCATE_REASON_REJECTED)
    target.tell(message)
    target.tell(message)  # nor twice
    target.tell(pb.Truncate(slot=1, committed_len=4000, reason=pb.TRUNCATE_REASON_STOP))  # nor a late, long one
    target.tell(pb.Truncate(slot=99, committed_len=1, reason=pb.TRUNCATE_REASON_WASTED))  # nor an unknown slot
    target.tell(pb.Truncate(slot=1, committed_len=15))
    committed = [*prompt, *verdict.token_ids]
    after = await target.ask(verify(1, len(committed)))
    assert list(after.token_ids) == reference.greedy(committed, 1)
    metrics = await target.metrics()
    gained = {name: metrics[name] - before.get(name, 0.0) for name in metrics}
    name = 'outrider_worker_truncates_total{{reason="{}",worker="target"}}'
    reasons = {reason: gained[name.format(reason)] for reason in ("rejected", "stop", "wasted", "unspecified")}
    assert reasons == {"rejected": 2, "stop": 1, "wasted": 1, "unspecified": 1}


# leases


async def test_a_lease_steps_by_itself_until_its_length(target: ControlClient, reference: ReferenceModel) -> None:
    await target.opened(1, PROMPT)
    expected, start = reference.greedy(PROMPT, 9), len(PROMPT)
    message = verify(1, start, num_steps=4)
    replies = target.follow(message)
    ids = list[int]()
    for verdict in await replies.verdicts(4):
        assert verdict.committed_len == start + len(ids)
        ids += verdict.token_ids
    for slot, ticket, until in (
        (1, message.tickets[0].ticket, start + 4),
        (1, message.tickets[0].ticket, 3),
        (1, new_ticket(), start + 9),
        (2, message.tickets[0].ticket, start + 9),
    ):
        target.tell(tpb.Extend(slot=slot, ticket=ticket, lease_end_len=until))
    await target.taken()
    assert replies.empty, "what is repeated, late or for another changed something"
    target.tell(tpb.Extend(slot=1, ticket=message.tickets[0].ticket, lease_end_len=start + 9))
    target.tell(tpb.Extend(slot=1, ticket=message.tickets[0].ticket, lease_end_len=start + 6))
    for verdict in await replies.verdicts(5):
        ids += verdict.token_ids
    assert ids == expected and replies.empty


# nothing leaks


@pytest.mark.parametrize("how, first_id", [("cancel", 10), ("half close", 110), ("channel close", 210)])
async def test_a_stream_that_ends_frees_everything(
    target: ControlClient, target_worker: Process, how: str, first_id: int
) -> None:
    other = ControlClient(target_worker.address, "target")
    async with other:
        for slot in range(3):
            # Prompts that share nothing, not with another case either: what is known is not fed before it is asked for.
            await other.opened(slot, list(range(first_id + 30 * slot, first_id + 30 * (slot + 1))), k=3)
        other.start(verify(0, 30, ticket=new_ticket(), num_steps=9))
        await other.ask(verify(1, 30))
        await eventually(
            lambda info: info.num_slots_in_use == 3 and info.num_kv_blocks_in_use >= 6 and info.num_leases == 2, target
        )
        if how == "cancel":
            other.stream.cancel()
        elif how == "half close":
            await other.stream.done_writing()
        else:
            await other.channel.close()  # type: ignore[call-arg]
        await eventually(idle, target)


# prompts' log-probs


def check_scores(verdict: tpb.Verdict, reference: ReferenceModel, prompt: list[int], num_best: int) -> None:
    """Against transformers' own forward over the whole prompt."""
    laws = reference.logits(prompt).log_softmax(dim=1)[:-1]  # [P - 1, V]
    assert len(verdict.prompt_logprobs) == len(prompt) - 1
    for told, law, token_id in zip(verdict.prompt_logprobs, laws, prompt[1:], strict=True):
        assert abs(told.logprob - float(law[token_id])) < 1e-4
        assert told.rank == 1 + int((law > law[token_id]).sum())
        best = law.topk(num_best)
        assert list(told.top_ids) == best.indices.tolist()
        assert list(told.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 17, 18, 120])
async def test_prompts_are_scored_as_transformers_does(
    target: ControlClient, reference: ReferenceModel, length: int
) -> None:
    """Short ones that would ride along in a step, and ones of several pieces, whether the cache has them or not; beside
    others that go on meanwhile; and the answer is the same.
    """
    prompt = [(7 * at + at * at) % VOCAB for at in range(length)]
    await target.opened(1, prompt)
    plain = await target.ask(verify(1, length))
    assert not plain.prompt_logprobs
    await target.opened(2, PROMPT)
    beside = target.follow(verify(2, len(PROMPT), num_steps=20))
    for num_best in (0, 3):
        await target.opened(3, prompt, num_prompt_logprobs=num_best, temperature=1.0, logit_bias={5: 9.0}, top_k=2)
        first = await target.ask(verify(3, length))
        check_scores(first, reference, prompt, num_best)
        assert first.num_cached_tokens == 0
        again = await target.ask(verify(3, length, first.token_ids))
        assert not again.prompt_logprobs, "they are told once"
    await target.opened(1, prompt)
    assert (await target.ask(verify(1, length))).token_ids == plain.token_ids
    assert len((await beside.next()).token_ids) > 0


async def test_a_slot_that_is_opened_again_is_scored_up_to_its_prompts_end(
    target: ControlClient, reference: ReferenceModel
) -> None:
    """As on another target, where output is committed already."""
    prompt = [(3 * at) % VOCAB for at in range(40)]
    committed = [*prompt, *reference.greedy(prompt, 4)]
    await target.opened(1, committed, num_prompt=len(prompt), num_prompt_logprobs=2)
    verdict = await target.ask(verify(1, len(committed)))
    check_scores(verdict, reference, prompt, 2)
    assert list(verdict.token_ids) == reference.greedy(committed, 1)


async def test_no_prompt_is_scored_for_beams_nor_with_more_than_are_told(target: ControlClient) -> None:
    for options in ({"num_prompt_logprobs": 21}, {"num_prompt_logprobs": 1, "beams": BeamParams(2)}):
        refused = await target.ask(open_slot(1, PROMPT, **options))
        assert isinstance(refused, pb.WorkerError) and refused.code == pb.WORKER_ERROR_CODE_INVALID
        assert "num_prompt_logprobs" in refused.message
