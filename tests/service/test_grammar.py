"""Grammars over real gRPC, at a target with a draft beside it: what is said follows them, whoever drafts, and what
cannot be followed ends alone.
"""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from llguidance import LLMatcher
from tokenizers import Tokenizer

from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import AcceptanceRule
from tests.service.conftest import stream_to, worker
from tests.service.control_client import ControlClient, advance, new_ticket, open_slot, verify
from tests.stack import Process
from tests.tiny_models import EOS_ID, perturbed_copy

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31)
SCHEMA = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["weather", "weather_report"]},
            "note": {"type": "string", "maxLength": 8},
            "n": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["kind", "note", "n"],
        "additionalProperties": False,
    },
    overrides={"whitespace_flexible": False},
)
EXPLODING = LLMatcher.grammar_from_regex("(a|b)*a(a|b){12}!")
COUPLED: dict[str, Any] = {"temperature": 1.0, "acceptance": AcceptanceRule.COUPLED}
LIMIT = "@outrider.wire.requests.grammar_limits.MAX_LEXER_STATES=200"
"""Few, so that an expression explodes within an answer."""


@pytest.fixture(scope="module")
def target_worker(target_folder: str) -> Iterator[Process]:
    with worker("target_service", target_folder, "--max-slots", "8", LIMIT) as process:
        yield process


@pytest.fixture(scope="module")
def draft_worker(target_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = perturbed_copy(target_folder, tmp_path_factory.mktemp("draft"), noise=0.3)
    with worker("draft_service", folder, "--max-slots", "8", LIMIT) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def target(target_worker: Process) -> AsyncIterator[ControlClient]:
    async with stream_to(target_worker, "target") as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(target_folder: str) -> Tokenizer:
    return Tokenizer.from_file(f"{target_folder}/tokenizer.json")


def opening(slot: int, k: int, **options: Any) -> pb.OpenSlot:
    drafter = options.pop("drafter", None)
    message = open_slot(slot, PROMPT, k=k, **{"max_tokens": 100, "ignore_eos": False, "grammar": SCHEMA, **options})
    if drafter is not None:
        message.drafter = drafter
    return message


async def answer(
    target: ControlClient, draft: ControlClient | None = None, *, address: str = "", k: int = 0, **options: Any
) -> tuple[list[int], list[tpb.Verdict]]:
    """Output and verdicts, to the end. With a draft it delivers to the target at this address."""
    reply = await target.ask(opening(1, k, **options))
    assert isinstance(reply, pb.OpenReply), reply
    if draft is not None:
        draft.tell(opening(1, k, target_address=address, target_epoch=target.epoch, **options))  # nobody waits for it
    ids, verdicts = list[int](), list[tpb.Verdict]()
    while not verdicts or not verdicts[-1].finish_reason:
        ticket, known = new_ticket(), len(PROMPT) + len(ids)
        if draft is not None:
            draft.tell(advance(1, len(PROMPT), ids, ticket))
        verdict = await target.ask(verify(1, known, ticket=ticket if draft is not None else None))
        assert isinstance(verdict, tpb.Verdict), verdict
        verdicts.append(verdict)
        ids += verdict.token_ids
    for client in (target, draft):
        if client is not None:
            client.tell(pb.CloseSlot(slot=1))
    return ids, verdicts


def check_text(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    assert ids[-1] == EOS_ID
    said = json.loads(tokenizer.decode(ids[:-1], skip_special_tokens=False))
    assert list(said) == ["kind", "note", "n"] and said["kind"] in ("weather", "weather_report")
    assert len(said["note"]) <= 8 and 0 <= said["n"] <= 999


@pytest.mark.parametrize("options", [{}, *({**COUPLED, "seed": seed} for seed in range(3))])
async def test_the_text_follows_it_and_does_not_depend_on_drafts(
    target: ControlClient, target_worker: Process, draft_worker: Process, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    alone, plain = await answer(target, **options)
    check_text(tokenizer, alone)
    assert not any(verdict.num_drafted for verdict in plain)
    for own in ("ngram", "lookup", None):  # without a drafter, what the grammar leaves no choice of alone
        ids, verdicts = await answer(target, k=4, drafter=own, **options)
        assert ids == alone
        forced = [v for v in verdicts if v.num_drafted and v.drafter == ""]
        assert sum(v.num_drafted for v in forced) >= 5
        assert all(v.num_accepted == v.num_drafted for v in forced)
    async with stream_to(draft_worker, "draft") as draft:
        ids, verdicts = await answer(target, draft, address=target_worker.address, k=4, **options)
    assert ids == alone
    assert sum(v.num_accepted for v in verdicts if v.drafter == "model") > 0


@pytest.mark.parametrize("seed", range(3))
async def test_under_rejection_it_is_followed_too(
    target: ControlClient, target_worker: Process, draft_worker: Process, tokenizer: Tokenizer, seed: int
) -> None:
    async with stream_to(draft_worker, "draft") as draft:
        ids, verdicts = await answer(target, draft, address=target_worker.address, k=4, temperature=1.0, seed=seed)
    check_text(tokenizer, ids)
    assert sum(v.num_accepted for v in verdicts if v.drafter == "model") > 0


async def test_messages_of_a_slot_wait_for_its_grammar(target: ControlClient) -> None:
    """Sent without waiting: they are taken in order, and those of other slots pass by."""
    grammar = LLMatcher.grammar_from_regex("(x|y){3,9}" * 20)
    opened = target.start(opening(1, 0, grammar=grammar))
    first = target.start(verify(1, len(PROMPT)))
    target.tell(pb.CloseSlot(slot=1))
    again = target.start(opening(1, 0, grammar=SCHEMA))
    second = target.start(verify(1, len(PROMPT)))
    assert isinstance(await opened, (pb.OpenReply, pb.WorkerError)) and isinstance(await again, pb.OpenReply)
    assert isinstance(await first, (tpb.Verdict, pb.WorkerError)) and isinstance(await second, tpb.Verdict)
    target.tell(pb.CloseSlot(slot=1))


async def test_an_expression_that_explodes_ends_its_own_request_alone(
    target: ControlClient, tokenizer: Tokenizer
) -> None:
    end = tokenizer.encode("!").ids[0]
    options = {"max_tokens": 240, "temperature": 5.0, "seed": 3, "logit_bias": {end: -100.0}}
    for slot, grammar in ((1, EXPLODING), (2, "")):
        opened = await target.ask(opening(slot, 4, grammar=grammar, **{**options, "ignore_eos": not grammar}))
        assert isinstance(opened, pb.OpenReply)
    length, failed = {1: len(PROMPT), 2: len(PROMPT)}, None
    while failed is None:
        asked = {slot: target.start(verify(slot, length[slot])) for slot in length}
        for slot, future in asked.items():
            reply = await future
            if isinstance(reply, pb.WorkerError):
                assert slot == 1, (reply, length)
                failed = reply
            else:
                length[slot] += len(reply.token_ids)
    assert failed.code == pb.WORKER_ERROR_CODE_GRAMMAR
    assert "no further: its lexer has too many states, more than 200 (MAX_LEXER_STATES); ask for" in failed.message
    assert isinstance(await target.ask(verify(2, length[2])), tpb.Verdict)
    for slot in length:
        target.tell(pb.CloseSlot(slot=slot))
    check = await answer(target)
    assert check[0][-1] == EOS_ID
