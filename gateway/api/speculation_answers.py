"""What an answer says of its tokens and rounds where the request asks for it: plain dicts for orjson. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.generation import OutputTimings, RoundOutput
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2, gateway_pb2
from outrider.wire.kinds import DraftTokenKind

Json = dict[str, Any]


def speculation_of(output: RoundOutput, tokenizer: Tokenizer) -> Json:
    """Return the kinds of an output's tokens and, where it is explained, its round."""
    tokens = [
        {"id": token.id, "text": tokenizer.token_text(token.id), "kind": token.kind.label} for token in output.tokens
    ]
    told: Json = {"tokens": tokens}
    if output.explanation is not None:
        told["round"] = _round(output, output.explanation)
    return told


def _round(output: RoundOutput, told: gateway_pb2.RoundExplanation) -> Json:
    verified = told.verified
    return {
        "committed_len": told.committed_len,
        "drafter": told.drafter or None,
        "num_drafted": output.num_drafted,
        "num_accepted": output.num_accepted,
        "batch_size": told.batch_size,
        "draft": [
            {
                "id": token.id,
                "text": token.text,
                "parent": token.parent,
                "accepted": token.accepted,
                "kind": DraftTokenKind(token.kind).name.lower(),
            }
            for token in verified.draft
        ],
        "rejection": _rejection(verified.rejection) if verified.HasField("rejection") else None,
        "timings": _timings(output.timings, told),
    }


def _rejection(told: common_pb2.Rejection) -> Json:
    return {
        "parent": told.parent,
        "token": {"id": told.token.id, "text": told.token.text},
        "target": _ranked(told.target),
        "draft_law": _ranked(told.draft_law) or None,
        "draft_guesses": [{"id": token.id, "text": token.text} for token in told.draft_guesses] or None,
    }


def _ranked(tokens: Iterable[common_pb2.RankedToken]) -> list[Json]:
    return [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in tokens]


def _timings(timings: OutputTimings, told: gateway_pb2.RoundExplanation) -> Json:
    """Return the parts of a round's time in microseconds. They sum to the total, unless verdicts came together."""
    total_us, hold_us = round(1e6 * timings.total_s), round(1e6 * timings.deliver_s)
    target = {"queue_us": told.queue_us, "forward_us": told.forward_us, "accept_us": told.accept_us}
    other_us = max(0, total_us - hold_us - sum(target.values()))
    draft_us = told.verified.draft_us if told.verified.HasField("draft_us") else None
    return {"total_us": total_us, "hold_us": hold_us, **target, "other_us": other_us, "draft_us": draft_us}
