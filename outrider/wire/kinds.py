"""The protocol's enumerations as Python types, for services and gateway alike. Values match the proto."""

from __future__ import annotations

from enum import Enum

from outrider.v1 import common_pb2 as pb


class TokenKind(Enum):
    """Why a token is in the answer. A target knows the first four; the gateway tells the accepted ones apart."""

    ACCEPTED = pb.TOKEN_KIND_ACCEPTED
    RECOVERED = pb.TOKEN_KIND_RECOVERED
    BONUS = pb.TOKEN_KIND_BONUS
    PLAIN = pb.TOKEN_KIND_PLAIN
    FORCED = pb.TOKEN_KIND_FORCED
    """Accepted, where the grammar left no choice."""
    PREDICTED = pb.TOKEN_KIND_PREDICTED
    """Accepted from the request's prediction."""

    @property
    def counted(self) -> TokenKind:
        """Return what it counts as: accepted, recovered, bonus or plain."""
        return TokenKind.ACCEPTED if self in (TokenKind.FORCED, TokenKind.PREDICTED) else self

    @property
    def label(self) -> str:
        return self.name.lower()


class DraftTokenKind(Enum):
    """What a draft token is that a target has verified."""

    DRAWN = pb.DRAFT_TOKEN_KIND_DRAWN
    GUESS = pb.DRAFT_TOKEN_KIND_GUESS
    FORCED = pb.DRAFT_TOKEN_KIND_FORCED
    PREDICTED = pb.DRAFT_TOKEN_KIND_PREDICTED


class AcceptanceRule(Enum):
    """How a target decides which draft tokens are kept at temperature > 0."""

    REJECTION = pb.ACCEPTANCE_RULE_REJECTION
    COUPLED = pb.ACCEPTANCE_RULE_COUPLED


class EarlyStopping(Enum):
    """When a beam search with as many answers as beams ends, before max_tokens. The labels are transformers'."""

    FALSE = pb.EARLY_STOPPING_FALSE
    TRUE = pb.EARLY_STOPPING_TRUE
    NEVER = pb.EARLY_STOPPING_NEVER


TABLES = "tables"
"""Attention path of a draft worker without a model."""


class DraftLogprobs(Enum):
    """How `rejection` proposals travel."""

    AUTO = pb.DRAFT_LOGPROBS_AUTO
    FULL = pb.DRAFT_LOGPROBS_FULL
    TOPK = pb.DRAFT_LOGPROBS_TOPK


TRUNCATE_REASONS = {
    pb.TRUNCATE_REASON_UNSPECIFIED: "unspecified",
    pb.TRUNCATE_REASON_REJECTED: "rejected",
    pb.TRUNCATE_REASON_STOP: "stop",
    pb.TRUNCATE_REASON_WASTED: "wasted",
}
"""Values of the label `reason` in the series that count truncations, for gateway and workers."""
