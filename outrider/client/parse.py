"""Conversion of the gateway's protobuf messages into the SDK's dataclasses. Called by `aio` and `stream`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outrider.client.types import (
    DraftToken,
    DraftTokenKind,
    Explanation,
    FinishReason,
    Model,
    RankedToken,
    Rejection,
    Round,
    RoundTimings,
    Token,
    TokenKind,
    TokenLogprobs,
)
from outrider.client.usage import Usage
from outrider.v1 import common_pb2, gateway_pb2
from outrider.wire.errors import OutriderError
from outrider.wire.requests.drafters import Drafter

_KINDS = {
    common_pb2.TOKEN_KIND_ACCEPTED: TokenKind.ACCEPTED,
    common_pb2.TOKEN_KIND_RECOVERED: TokenKind.RECOVERED,
    common_pb2.TOKEN_KIND_BONUS: TokenKind.BONUS,
    common_pb2.TOKEN_KIND_PLAIN: TokenKind.PLAIN,
    common_pb2.TOKEN_KIND_FORCED: TokenKind.FORCED,
    common_pb2.TOKEN_KIND_PREDICTED: TokenKind.PREDICTED,
}
_DRAFT_KINDS = {
    common_pb2.DRAFT_TOKEN_KIND_SAMPLED: DraftTokenKind.DRAWN,
    common_pb2.DRAFT_TOKEN_KIND_DETERMINISTIC: DraftTokenKind.GUESS,
    common_pb2.DRAFT_TOKEN_KIND_FORCED: DraftTokenKind.FORCED,
    common_pb2.DRAFT_TOKEN_KIND_PREDICTED: DraftTokenKind.PREDICTED,
}
_FINISH_REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_S_PER_US = 1e-6
"""Seconds in a microsecond, which is the unit of times in messages."""


def parse_round(message: gateway_pb2.GenerateResponse) -> Round:
    """Convert a message of a Generate call into a `Round`. Raises OutriderError for an enum value that this client does
    not know, which a newer gateway may send.
    """
    if message.finish_reason not in _FINISH_REASONS:
        raise OutriderError(f"unknown finish reason {message.finish_reason} from the gateway; upgrade this client")
    usage = None
    if message.HasField("usage"):
        usage = _usage(message.usage)
    explanation = None
    if message.HasField("explanation"):
        explanation = _explanation(message.explanation)
    return Round(
        request_id=message.request_id,
        choice=message.choice,
        tokens=tuple(map(_token, message.tokens)),
        text_delta=message.text_delta,
        num_drafted=message.num_drafted,
        num_accepted=message.num_accepted,
        timings=_timings(message.timings),
        finish_reason=_FINISH_REASONS[message.finish_reason],
        stop_reason=message.stop_reason or None,
        usage=usage,
        score=_optional(message, "score"),
        explanation=explanation,
    )


def parse_model(message: gateway_pb2.Model) -> Model:
    """Convert a message into a `Model`. Drafters that this client does not know are left out."""
    return Model(
        id=message.id,
        context_limit=message.context_limit,
        vocab_size=message.vocab_size,
        draft_id=_optional(message, "draft_id"),
        drafters=tuple(drafter for drafter in Drafter if drafter in message.drafters),
    )


def _token(message: gateway_pb2.GeneratedToken) -> Token:
    if message.kind not in _KINDS:
        raise OutriderError(f"unknown token kind {message.kind} from the gateway; upgrade this client")
    logprobs = None
    if message.HasField("logprobs"):
        top = zip(message.logprobs.top_ids, message.logprobs.top_logprobs, strict=True)
        logprobs = TokenLogprobs(logprob=message.logprobs.logprob, top=tuple(top))
    return Token(id=message.id, kind=_KINDS[message.kind], text=message.text, logprobs=logprobs)


def _explanation(message: gateway_pb2.RoundExplanation) -> Explanation:
    verified = message.verified
    rejection = None
    if verified.HasField("rejection"):
        rejection = _rejection(verified.rejection)
    draft_s = None
    if verified.HasField("draft_us"):
        draft_s = verified.draft_us * _S_PER_US
    return Explanation(
        committed_len=message.committed_len,
        drafter=message.drafter or None,
        batch_size=message.batch_size,
        draft=tuple(map(_draft_token, verified.draft)),
        rejection=rejection,
        queue_s=message.queue_us * _S_PER_US,
        forward_s=message.forward_us * _S_PER_US,
        accept_s=message.accept_us * _S_PER_US,
        draft_s=draft_s,
    )


def _draft_token(message: common_pb2.DraftToken) -> DraftToken:
    if message.kind not in _DRAFT_KINDS:
        raise OutriderError(f"unknown kind {message.kind} of a draft token from the gateway; upgrade this client")
    return DraftToken(message.id, message.text, message.parent, message.is_accepted, _DRAFT_KINDS[message.kind])


def _rejection(message: common_pb2.Rejection) -> Rejection:
    return Rejection(
        parent=message.parent,
        token=_ranked_token(message.token),
        target=_ranked_tokens(message.target),
        draft_law=_ranked_tokens(message.draft_distribution),
        draft_guesses=_ranked_tokens(message.deterministic_tokens),
    )


def _ranked_tokens(messages: Iterable[common_pb2.RankedToken]) -> tuple[RankedToken, ...]:
    return tuple(map(_ranked_token, messages))


def _ranked_token(message: common_pb2.RankedToken) -> RankedToken:
    return RankedToken(message.id, message.text, _optional(message, "logprob"))


def _timings(message: gateway_pb2.RoundTimings) -> RoundTimings:
    return RoundTimings(
        total_s=message.total_us * _S_PER_US,
        deliver_s=message.deliver_us * _S_PER_US,
        verify_s=message.verify_us * _S_PER_US,
        overhead_s=message.overhead_us * _S_PER_US,
    )


def _usage(message: gateway_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.num_prompt_tokens,
        num_completion_tokens=message.num_completion_tokens,
        num_rounds=message.num_rounds,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_plain_steps=message.num_plain_steps,
        num_wasted_tokens=message.num_wasted_tokens,
        seed=message.seed,
        lenience=_optional(message, "lenience"),
        num_cached_prompt_tokens=message.num_cached_prompt_tokens,
        num_accepted_prediction_tokens=message.num_accepted_prediction_tokens,
        num_rejected_prediction_tokens=message.num_rejected_prediction_tokens,
        plain_reason=message.plain_reason or None,
    )


def _optional(message: Any, field: str) -> Any:
    if not message.HasField(field):
        return None
    return getattr(message, field)
