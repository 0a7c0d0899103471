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


class Drafter(Enum):
    """Names who proposes draft tokens. All but MODEL work in the target worker.

    A_MODEL is A where that has something to propose, and else MODEL; A_AND_MODEL is both, in one tree. MODEL_AND_MODEL
    is a draft worker of each pool, all in one tree.
    """

    MODEL = pb.DRAFTER_MODEL
    NGRAM = pb.DRAFTER_NGRAM
    LOOKUP = pb.DRAFTER_LOOKUP
    UNIGRAM = pb.DRAFTER_UNIGRAM
    BIGRAM = pb.DRAFTER_BIGRAM
    HEADS = pb.DRAFTER_HEADS
    LOOKAHEAD = pb.DRAFTER_LOOKAHEAD
    PASS = pb.DRAFTER_PASS
    NGRAM_MODEL = pb.DRAFTER_NGRAM_MODEL
    LOOKUP_MODEL = pb.DRAFTER_LOOKUP_MODEL
    LOOKAHEAD_MODEL = pb.DRAFTER_LOOKAHEAD_MODEL
    PREDICTION = pb.DRAFTER_PREDICTION
    PREDICTION_MODEL = pb.DRAFTER_PREDICTION_MODEL
    NGRAM_AND_MODEL = pb.DRAFTER_NGRAM_AND_MODEL
    LOOKUP_AND_MODEL = pb.DRAFTER_LOOKUP_AND_MODEL
    MODEL_AND_MODEL = pb.DRAFTER_MODEL_AND_MODEL

    @property
    def label(self) -> str:
        """Name that users see, such as ngram+model and ngram&model."""
        return self.name.lower().replace("_and_", "&").replace("_", "+")

    @property
    def own(self) -> Drafter | None:
        """The drafter's part in the target worker; None where it has none."""
        part = Drafter[self.name.removesuffix("_MODEL").removesuffix("_AND")]
        return None if part is Drafter.MODEL else part

    @property
    def unites(self) -> bool:
        """Whether what all parts propose goes into one tree."""
        return self.name.endswith("_AND_MODEL")

    @property
    def asks_model(self) -> bool:
        return self is Drafter.MODEL or self is not self.own


DRAFTERS = {each.label: each for each in Drafter}
"""Drafters by label."""
OF_A_TEXT = (Drafter.UNIGRAM, Drafter.BIGRAM)
"""Those that count in a text."""


GRAMMAR = "grammar"
"""Stands for a drafter where the request's grammar left no choice: its label in logs, series and answers."""


def drafter_label(text: str) -> str:
    """Return the label of a drafter that may be written with a bar, as ngram|model."""
    return text.replace("|", "+")


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
