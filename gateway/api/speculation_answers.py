"""Writes the field `speculation` of a choice: the kinds of its output tokens, and what its round verified.

Used only if a request asks for it. The results are plain dicts, for orjson. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.generation import OutputTimings, RoundOutput
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2, gateway_pb2
from outrider.wire.kinds import DraftTokenKind

Json = dict[str, Any]
_DRAFT_TOKEN_KINDS = {
    DraftTokenKind.SAMPLED: "drawn",
    DraftTokenKind.DETERMINISTIC: "guess",
    DraftTokenKind.FORCED: "forced",
    DraftTokenKind.PREDICTED: "predicted",
}
"""Values of a draft token's `kind` in replies."""


def speculation_of(output: RoundOutput, tokenizer: Tokenizer) -> Json:
    """Return the field `speculation` for one output of a choice.

    It holds the kinds of the output's tokens and, if the round is explained, what the round verified and rejected.
    """
    tokens = [
        {"id": token.id, "text": tokenizer.token_text(token.id), "kind": token.kind.label} for token in output.tokens
    ]
    if output.explanation is None:
        return {"tokens": tokens}
    return {"tokens": tokens, "round": _round(output, output.explanation)}


def _round(output: RoundOutput, explanation: gateway_pb2.RoundExplanation) -> Json:
    verified = explanation.verified
    rejection = None
    if verified.HasField("rejection"):
        rejection = _rejection(verified.rejection)
    return {
        "committed_len": explanation.committed_len,
        "drafter": explanation.drafter or None,
        "num_drafted": output.num_drafted,
        "num_accepted": output.num_accepted,
        "batch_size": explanation.batch_size,
        "draft": [
            {
                "id": token.id,
                "text": token.text,
                "parent": token.parent,
                "accepted": token.is_accepted,
                "kind": _DRAFT_TOKEN_KINDS[DraftTokenKind(token.kind)],
            }
            for token in verified.draft
        ],
        "rejection": rejection,
        "timings": _timings(output.timings, explanation),
    }


def _rejection(rejection: common_pb2.Rejection) -> Json:
    return {
        "parent": rejection.parent,
        "token": {"id": rejection.token.id, "text": rejection.token.text},
        "target": _ranked(rejection.target),
        "draft_law": _ranked(rejection.draft_distribution) or None,
        "draft_guesses": [{"id": token.id, "text": token.text} for token in rejection.deterministic_tokens] or None,
    }


def _ranked(tokens: Iterable[common_pb2.RankedToken]) -> list[Json]:
    return [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in tokens]


def _timings(timings: OutputTimings, explanation: gateway_pb2.RoundExplanation) -> Json:
    """The parts sum to the total, except where the verdicts of several rounds arrived together."""
    total_us = round(1e6 * timings.total_s)
    hold_us = round(1e6 * timings.deliver_s)
    target = {
        "queue_us": explanation.queue_us,
        "forward_us": explanation.forward_us,
        "accept_us": explanation.accept_us,
    }
    other_us = max(0, total_us - hold_us - sum(target.values()))
    draft_us = None
    if explanation.verified.HasField("draft_us"):
        draft_us = explanation.verified.draft_us
    return {"total_us": total_us, "hold_us": hold_us, **target, "other_us": other_us, "draft_us": draft_us}
