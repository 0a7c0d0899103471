"""The enums of the protobuf messages as Python enums with the same values. Used by gateway and workers; the SDK has
enums of its own.
"""

from __future__ import annotations

from enum import Enum

from outrider.v1 import common_pb2 as pb


class TokenKind(Enum):
    """How an output token was made. A target reports ACCEPTED, RECOVERED, BONUS or PLAIN (from a step without draft
    tokens). The gateway turns ACCEPTED into FORCED where the grammar allowed no other token, and into PREDICTED for a
    token that was copied from the request's prediction.
    """

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
        """The kind under which metrics and the field `usage` count a token of this kind: ACCEPTED for FORCED and
        PREDICTED, and the kind itself for all others.
        """
        if self in (TokenKind.FORCED, TokenKind.PREDICTED):
            return TokenKind.ACCEPTED
        return self

    @property
    def label(self) -> str:
        """Name of the kind in metrics and HTTP replies, such as "accepted"."""
        return self.name.lower()


class DraftTokenKind(Enum):
    """How a draft token was proposed. The target reports it for draft tokens that it has verified."""

    SAMPLED = pb.DRAFT_TOKEN_KIND_SAMPLED
    """Sampled from a distribution of the drafter that was sent to the target along with the draft token."""
    DETERMINISTIC = pb.DRAFT_TOKEN_KIND_DETERMINISTIC
    """Proposed by a drafter that sends no distribution, for example by n-grams."""
    FORCED = pb.DRAFT_TOKEN_KIND_FORCED
    """Proposed by a grammar that allows no other token."""
    PREDICTED = pb.DRAFT_TOKEN_KIND_PREDICTED
    """Copied from the request's prediction."""


class AcceptanceRule(Enum):
    """Rule by which a target accepts draft tokens at temperature > 0."""

    REJECTION = pb.ACCEPTANCE_RULE_REJECTION
    COUPLED = pb.ACCEPTANCE_RULE_COUPLED


class EarlyStopping(Enum):
    """When a beam search with n finished outputs ends before max_tokens, as transformers' parameter `early_stopping`
    says it: TRUE = at once. FALSE = once no beam, scored at its present length, is better than the worst finished
    output. NEVER = once no beam can become better than that output.
    """

    FALSE = pb.EARLY_STOPPING_FALSE
    TRUE = pb.EARLY_STOPPING_TRUE
    NEVER = pb.EARLY_STOPPING_NEVER


TABLES = "tables"
"""Value of `WorkerInfo.attention_path` for a draft worker that has no model and proposes tokens from tables, such as
n-grams."""


class DraftLogprobs(Enum):
    """How much of each draft token's distribution is sent to the target under the acceptance rule `rejection`. FULL =
    the log-probs of the whole vocabulary, TOPK = those of the most likely tokens, AUTO = the worker chooses one of the
    two.
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
"""Maps the reason of a Truncate message (protobuf enum TruncateReason) to the value of the label `reason` in the
metrics that count these messages. Used by gateway and workers."""
