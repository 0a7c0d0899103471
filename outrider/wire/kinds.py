"""The enums of the protobuf messages as Python enums with the same values. Used by gateway and workers; the SDK has
enums of its own.
"""

from __future__ import annotations

from enum import Enum

from outrider.v1 import common_pb2 as pb


class TokenKind(Enum):
    """How an output token was made. A target reports the first four; the gateway derives FORCED and PREDICTED."""

    ACCEPTED = pb.TOKEN_KIND_ACCEPTED
    RECOVERED = pb.TOKEN_KIND_RECOVERED
    BONUS = pb.TOKEN_KIND_BONUS
    PLAIN = pb.TOKEN_KIND_PLAIN
    FORCED = pb.TOKEN_KIND_FORCED
    """An accepted draft token at a position where the grammar allowed no other token."""
    PREDICTED = pb.TOKEN_KIND_PREDICTED
    """An accepted draft token that was copied from the request's prediction."""

    @property
    def counted(self) -> TokenKind:
        """The kind as which metrics and usage count such a token: ACCEPTED for FORCED and PREDICTED, otherwise the same
        kind.
        """
        if self in (TokenKind.FORCED, TokenKind.PREDICTED):
            return TokenKind.ACCEPTED
        return self

    @property
    def label(self) -> str:
        """Name of the kind in metrics and HTTP replies, such as "accepted"."""
        return self.name.lower()


class DraftTokenKind(Enum):
    """How a draft token that a target has verified was proposed."""

    SAMPLED = pb.DRAFT_TOKEN_KIND_SAMPLED
    """Sampled from a distribution that was sent to the target along with the token."""
    DETERMINISTIC = pb.DRAFT_TOKEN_KIND_DETERMINISTIC
    """Proposed without a distribution."""
    FORCED = pb.DRAFT_TOKEN_KIND_FORCED
    """Proposed by a grammar that allows no other token."""
    PREDICTED = pb.DRAFT_TOKEN_KIND_PREDICTED
    """Copied from the request's prediction."""


class AcceptanceRule(Enum):
    """Rule by which a target accepts draft tokens at temperature > 0."""

    REJECTION = pb.ACCEPTANCE_RULE_REJECTION
    COUPLED = pb.ACCEPTANCE_RULE_COUPLED


class EarlyStopping(Enum):
    """When a beam search that has n finished outputs ends before max_tokens. Names and meanings are those of
    transformers' parameter `early_stopping`.
    """

    FALSE = pb.EARLY_STOPPING_FALSE
    TRUE = pb.EARLY_STOPPING_TRUE
    NEVER = pb.EARLY_STOPPING_NEVER


TABLES = "tables"
"""Value of `WorkerInfo.attention_path` for a draft worker without a model, which drafts from tables."""


class DraftLogprobs(Enum):
    """Which part of the distributions of draft tokens is sent to the target under the acceptance rule `rejection`: the
    whole vocabulary, the most likely tokens, or whichever of the two the worker chooses.
    """

    AUTO = pb.DRAFT_LOGPROBS_AUTO
    FULL = pb.DRAFT_LOGPROBS_FULL
    TOPK = pb.DRAFT_LOGPROBS_TOPK


TRUNCATE_REASONS = {
    pb.TRUNCATE_REASON_UNSPECIFIED: "unspecified",
    pb.TRUNCATE_REASON_REJECTED: "rejected",
    pb.TRUNCATE_REASON_STOP: "stop",
    pb.TRUNCATE_REASON_WASTED: "wasted",
}
"""Values of the label `reason` in the metrics that count truncations, by the enum's value. Used by gateway and workers.
"""
