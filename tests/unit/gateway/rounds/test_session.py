"""What a verdict makes of an answer: its tokens, text, end and usage."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.generation import FinishReason, GenerationRequest, OutputTimings, RoundOutput
from gateway.rounds.session import Session
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.requests.params import SamplingParams
from tests.service.scripted_generator import TIMINGS, demo_tokenizer
from tests.unit.gateway.rounds.verdicts import session_of

PROMPT = (5, 6, 7)


def apply(session: Session, ids: Sequence[int], **fields: Any) -> RoundOutput:
    """A verdict of these ids, all but the last of them accepted drafts."""
    kinds = [*[pb.TOKEN_KIND_ACCEPTED] * (len(ids) - 1), pb.TOKEN_KIND_BONUS]
    verdict = {"token_ids": ids, "kinds": kinds, "committed_len": session.committed_len, **fields}
    return session.apply(tpb.Verdict(**verdict), TIMINGS)


def test_a_stop_id_is_a_token_and_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown fox")
    session = session_of(tokenizer, stop_ids=(ids[-1],))
    output = apply(session, ids, finish_reason=pb.FINISH_REASON_STOP)
    assert output.text_delta == tokenizer.decode(ids[:-1])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, ids[-1])
    assert session.is_finished and session.committed == [*PROMPT, *ids]
    assert output.usage is not None and output.usage.num_completion_tokens == len(ids)


def test_a_stop_string_cuts_what_the_target_has_committed(tokenizer: Tokenizer) -> None:
    session, ids = session_of(tokenizer, " brown"), tokenizer.encode("the quick brown fox")
    output = apply(session, ids)
    num_kept = next(n for n in range(len(ids)) if " brown" in tokenizer.decode(ids[:n]))
    assert (output.text_delta, output.stop_reason) == ("the quick", " brown")
    assert [token.id for token in output.tokens] == ids[:num_kept] == session.committed[len(PROMPT) :]
    assert output.usage is not None and output.usage.num_completion_tokens == num_kept < len(ids)


def test_tokens_accepted_behind_the_end_are_counted_apart(tokenizer: Tokenizer) -> None:
    session, ids = session_of(tokenizer), tokenizer.encode("the quick")
    apply(session, ids[:1])
    output = apply(
        session,
        ids,
        num_drafted=8,
        num_accepted=8,
        kinds=[pb.TOKEN_KIND_ACCEPTED] * len(ids),
        finish_reason=pb.FINISH_REASON_STOP,
    )
    usage = output.usage
    assert usage is not None and (usage.num_rounds, usage.num_plain_steps) == (1, 1)
    assert (usage.num_accepted_tokens, usage.num_overrun_tokens) == (8, 8 - len(ids))
    assert usage.num_emitted_tokens == len(ids) and usage.num_completion_tokens == len(ids) + 1


def test_text_that_might_have_been_a_stop_comes_with_the_end(tokenizer: Tokenizer) -> None:
    session, ids = session_of(tokenizer, "quick red"), tokenizer.encode("the quick")
    assert apply(session, ids[:-1]).text_delta + apply(session, ids[-1:]).text_delta == "the "
    last = apply(session, tokenizer.encode(" r"), finish_reason=pb.FINISH_REASON_LENGTH)
    assert (last.text_delta, last.finish_reason, last.stop_reason) == ("quick r", FinishReason.LENGTH, None)


def test_explanations_have_texts_where_requested(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown fox")
    rejection = pb.Rejection(
        parent=0,
        token=pb.RankedToken(id=ids[1]),
        target=[pb.RankedToken(id=ids[1], logprob=-0.5)],
        deterministic_tokens=[pb.RankedToken(id=ids[2])],
    )
    draft = [pb.DraftToken(id=ids[0], parent=-1, is_accepted=True), pb.DraftToken(id=ids[2])]
    verified = pb.Explanation(draft=draft, rejection=rejection, draft_us=7)
    facts = {"num_drafted": 2, "num_accepted": 1, "drafter": "model", "batch_size": 3, "queue_us": 5}
    asked, not_asked = session_of(tokenizer, explain=True), session_of(tokenizer)
    told = apply(asked, ids[:2], **facts, explanation=verified).explanation
    assert apply(not_asked, ids[:2], **facts, explanation=verified).explanation is None
    assert told is not None and (told.committed_len, told.drafter, told.batch_size, told.queue_us) == (3, "model", 3, 5)
    texts = [tokenizer.token_text(token_id) for token_id in ids]
    assert [token.text for token in told.verified.draft] == [texts[0], texts[2]]
    assert told.verified.rejection.token.text == told.verified.rejection.target[0].text == texts[1]
    assert told.verified.rejection.deterministic_tokens[0].text == texts[2] and told.verified.draft_us == 7
    plain = apply(asked, ids[2:3]).explanation
    assert plain is not None and plain.drafter == "" and not plain.verified.draft
    stopped = session_of(tokenizer, tokenizer.decode(ids[:1]), explain=True)
    cut = apply(stopped, ids[:2], **facts, explanation=verified).explanation
    assert cut is not None and len(cut.verified.draft) == 2 and not cut.verified.HasField("rejection")


def test_usage_adds_up_over_rounds(tokenizer: Tokenizer) -> None:
    session, ids = session_of(tokenizer), tokenizer.encode("the quick brown fox")
    apply(session, ids[:2], num_drafted=5, num_accepted=1, num_cached_tokens=2)
    apply(session, ids[2:3], num_cached_tokens=3)
    assert session.max_draft_tokens() == 16 - 3 - 1, "a round commits one more than it accepts"
    usage = apply(session, ids[3:4], num_drafted=4, finish_reason=pb.FINISH_REASON_LENGTH).usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_cached_prompt_tokens, usage.num_completion_tokens) == (3, 2, 4)
    assert (usage.num_rounds, usage.num_plain_steps) == (2, 1)
    assert (usage.num_draft_tokens, usage.num_accepted_tokens) == (9, 1)


@pytest.mark.parametrize(("first", "told"), [(3, 3), (0, 0), (99, 5)])
def test_the_first_verdict_has_the_number_of_cached_tokens(first: int, told: int) -> None:
    """A slot that is opened again finds what this answer itself has left there. Never more than the prompt."""
    request = GenerationRequest(
        "r", "m", (5, 6, 7, 8, 9), SamplingParams(max_tokens=2), cache_salt=b"s", corpus_id=b"c"
    )
    session = Session(request, demo_tokenizer(), 1)
    opened = session.open_message()
    assert (opened.cache_salt, opened.corpus_id) == (b"s", b"c")
    for num_cached, finish in ((first, pb.FINISH_REASON_UNSPECIFIED), (4, pb.FINISH_REASON_LENGTH)):
        verdict = tpb.Verdict(
            committed_len=session.committed_len,
            token_ids=[11],
            kinds=[pb.TOKEN_KIND_PLAIN],
            num_cached_tokens=num_cached,
            finish_reason=finish,
        )
        output = session.apply(verdict, OutputTimings())
    assert output.usage is not None and output.usage.num_cached_prompt_tokens == told
