"""What a verdict makes of an answer: its tokens, text, end and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.generation import FinishReason, GenerationRequest, RoundOutput
from gateway.rounds.session import Session
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.params import SamplingParams
from tests.service.scripted_generator import TIMINGS, demo_tokenizer

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


def session_of(
    tokenizer: Tokenizer, *stop: str, stop_ids: tuple[int, ...] = (), prediction: tuple[int, ...] = ()
) -> Session:
    params = SamplingParams(max_tokens=16, stop_token_ids=stop_ids)
    request = GenerationRequest("r", "m", PROMPT, params, stop=stop, prediction_ids=prediction)
    return Session(request, tokenizer, slot_id=1)


def apply(session: Session, ids: Sequence[int], **fields: Any) -> RoundOutput:
    """A verdict of these ids, all but the last of them accepted drafts."""
    kinds = [*[pb.TOKEN_KIND_ACCEPTED] * (len(ids) - 1), pb.TOKEN_KIND_BONUS]
    verdict = {"token_ids": ids, "kinds": kinds, "committed_len": session.committed_len, **fields}
    return session.apply(tpb.Verdict(**verdict), TIMINGS)


def test_a_stop_id_is_a_token_and_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown fox")
    session = session_of(tokenizer, stop_ids=(ids[-1],))
    output = apply(session, ids, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=ids[-1])
    assert output.text_delta == tokenizer.decode(ids[:-1])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, ids[-1])
    assert session.finished and session.committed == [*PROMPT, *ids]
    assert output.usage is not None and output.usage.num_completion_tokens == len(ids)


def test_a_stop_string_cuts_what_the_target_has_committed(tokenizer: Tokenizer) -> None:
    session, ids = session_of(tokenizer, " brown"), tokenizer.encode("the quick brown fox")
    output = apply(session, ids)
    num_kept = next(n for n in range(len(ids)) if " brown" in tokenizer.decode(ids[:n]))
    assert (output.text_delta, output.stop_reason) == ("the quick", " brown")
    assert [token.id for token in output.tokens] == ids[:num_kept] == session.committed[len(PROMPT) :]
    assert output.usage is not None and output.usage.num_completion_tokens == num_kept < len(ids)


def test_text_that_might_have_been_a_stop_comes_with_the_end(tokenizer: Tokenizer) -> None:
    session, ids = session_of(tokenizer, "quick red"), tokenizer.encode("the quick")
    assert apply(session, ids[:-1]).text_delta + apply(session, ids[-1:]).text_delta == "the "
    last = apply(session, tokenizer.encode(" r"), finish_reason=pb.FINISH_REASON_LENGTH)
    assert (last.text_delta, last.finish_reason, last.stop_reason) == ("quick r", FinishReason.LENGTH, None)


def test_usage_adds_up_over_rounds(tokenizer: Tokenizer) -> None:
    session, ids = session_of(tokenizer), tokenizer.encode("the quick brown fox")
    apply(session, ids[:2], num_drafted=5, num_accepted=1, num_cached_tokens=2)
    apply(session, ids[2:3], num_cached_tokens=3)
    assert session.draft_room() == 16 - 3 - 1, "a round commits one more than it accepts"
    usage = apply(session, ids[3:4], num_drafted=4, finish_reason=pb.FINISH_REASON_LENGTH).usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_cached_prompt_tokens, usage.num_completion_tokens) == (3, 2, 4)
    assert (usage.num_rounds, usage.num_plain_steps) == (2, 1)
    assert (usage.num_draft_tokens, usage.num_accepted_tokens) == (9, 1)


def test_usage_says_what_of_a_prediction_came_and_what_is_left(tokenizer: Tokenizer) -> None:
    session, ids = session_of(tokenizer, prediction=(1, 2, 3, 4)), tokenizer.encode("the quick brown fox")
    seen = list[tuple[int, int]]()
    for token_id, num_foretold in ((ids[0], 0), (ids[1], 1), (ids[2], 1)):
        apply(session, [token_id], num_foretold=num_foretold, num_drafted=5, num_accepted=0)
        usage = session.usage
        seen.append((usage.num_accepted_prediction_tokens, usage.num_rejected_prediction_tokens))
    assert seen == [(0, 4), (1, 3), (2, 2)]
    apply(session, ids[3:4] * 5, num_foretold=5)
    assert (usage.num_accepted_prediction_tokens, usage.num_rejected_prediction_tokens) == (7, 0), "copied twice"


def test_what_a_stop_string_cuts_off_is_not_of_the_prediction(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown fox")
    session = session_of(tokenizer, " brown", prediction=tuple(ids))
    output = apply(session, ids, num_foretold=len(ids))
    assert output.usage is not None and output.usage.num_accepted_prediction_tokens == len(output.tokens) < len(ids)
