"""`Drafter`, the table of drafters by the labels that users write: which drafter in the target, and which use of draft
workers. Requests, settings, the SDK and the wire all use these labels.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Self

from outrider.wire.errors import InvalidRequest

GRAMMAR = "grammar"
"""Label in logs, metrics and replies for draft tokens that the request's grammar forced."""
_MAX_SHOWN_CHARS = 100
"""Characters of an unknown label in an error."""


class DraftWorkerUse(Enum):
    """Whether draft workers draft for a request. The values are the marks in labels."""

    NEVER = ""
    OR = "+"
    """They always draft. A step verifies their draft tokens or those of the target's drafter: those with the higher
    expected number of accepted tokens."""
    MERGED = "&"
    """They always draft, and their draft tokens and those of the other drafter form one merged tree."""
    IF_ANY = "?"
    """As OR if a draft worker is connected; the request runs without one too."""


def _started_with(setting: str) -> str:
    return f"takes a target started with --{setting} (outrider up --target-{setting})"


_NEVER = DraftWorkerUse.NEVER
_OR = DraftWorkerUse.OR
_BESIDE = DraftWorkerUse.MERGED
_IF_ANY = DraftWorkerUse.IF_ANY
_TEXT = _started_with("drafter-text FILE")
_TREES = "takes a model and an attention_path that run token trees"


class Drafter(StrEnum):
    """What proposes draft tokens for a request. None of the drafters changes the output's law.

    A member combines a drafter that runs in the target, or none, with a use of draft workers, as its label does:
    `ngram`, `ngram+model`, `ngram&model`; without a drafter in the target, `model` and `model&model`. `auto` is any
    drafter that is available.
    """

    draft_worker: DraftWorkerUse
    remedy: str
    """End of the error where this drafter is not available: what makes it available. Empty where that is obvious."""
    _own_label: str | None
    """Label of the drafter in the target; None = none."""

    def __new__(cls, own_label: str | None, draft_worker: DraftWorkerUse = _NEVER, remedy: str = "") -> Self:
        label = own_label or "model"
        if draft_worker is _BESIDE or (own_label and draft_worker is _OR):
            label += f"{draft_worker.value}model"
        drafter = str.__new__(cls, label)
        drafter._value_ = label
        drafter._own_label = own_label
        drafter.draft_worker = draft_worker
        drafter.remedy = remedy and f"; {label} {remedy}"
        return drafter

    AUTO = "auto", _IF_ANY
    """In each step the available drafter with the highest expected number of accepted tokens: the request's prediction,
    the target's heads, NGRAM, or a draft worker."""
    MODEL = None, _OR
    """A draft worker."""
    NGRAM = "ngram"
    """In the target: the tokens that followed the last tokens earlier in the sequence."""
    LOOKUP = "lookup"
    """In the target: the tokens that followed the longest earlier occurrence of the last tokens, in the sequence or in
    recent outputs."""
    UNIGRAM = "unigram", _NEVER, _TEXT
    """In the target: the most frequent tokens of a text that it was started with."""
    BIGRAM = "bigram", _NEVER, _TEXT
    """In the target: the tokens that most often follow the last one in a text that it was started with."""
    HEADS = "heads", _NEVER, _started_with("heads FOLDER")
    """In the target: Medusa's or blockwise heads that it was started with."""
    LOOKAHEAD = "lookahead", _NEVER, _TREES
    """In the target: lookahead decoding, n-grams that it makes in further rows of its steps."""
    PASS = "pass", _NEVER, _started_with("lookahead-embeddings FILE")
    """In the target: PaSS, look-ahead embeddings that it was started with."""
    NGRAM_MODEL = "ngram", _OR
    """NGRAM or a draft worker, whichever has the higher expected number of accepted tokens in a step."""
    LOOKUP_MODEL = "lookup", _OR
    LOOKAHEAD_MODEL = "lookahead", _OR, _TREES
    PREDICTION = "prediction"
    """In the target: the request's prediction, as far as the output follows it."""
    PREDICTION_MODEL = "prediction", _OR
    NGRAM_AND_MODEL = "ngram", _BESIDE, _TREES
    """NGRAM and a draft worker in one merged tree."""
    LOOKUP_AND_MODEL = "lookup", _BESIDE, _TREES
    MODEL_AND_MODEL = None, _BESIDE, "takes two pools of drafts, and a target that runs token trees"
    """A draft worker of each pool of drafts in one merged tree."""

    @classmethod
    def parse(cls, label: str, name: str = "drafter") -> Drafter:
        """Return the drafter of a label; `|` may stand for `+`. name: the parameter's, for errors. Raises
        InvalidRequest for any other text.
        """
        try:
            return cls(label)
        except ValueError:
            raise InvalidRequest(
                f"{name} is {label[:_MAX_SHOWN_CHARS]!r}, must be one of {', '.join(cls)}", param=name
            ) from None

    @classmethod
    def _missing_(cls, value: object) -> Drafter | None:
        if not isinstance(value, str):
            return None
        label = value.replace("|", "+")
        for drafter in cls:
            if drafter.value == label:
                return drafter
        return None

    @property
    def own(self) -> Drafter | None:
        """The drafter that runs in the target, or None: NGRAM for `ngram+model`."""
        if self._own_label is None:
            return None
        return Drafter(self._own_label)

    @property
    def uses_draft_worker(self) -> bool:
        """Whether it uses a draft worker if one is connected."""
        return self.draft_worker is not _NEVER

    @property
    def needs_draft_worker(self) -> bool:
        """Whether it cannot run without a draft worker."""
        return self.draft_worker in (_OR, _BESIDE)

    @property
    def is_merged(self) -> bool:
        """Whether several drafters' tokens form one merged tree."""
        return self.draft_worker is _BESIDE

    @property
    def needs_pools(self) -> bool:
        """Whether it merges the draft tokens of several pools of draft workers."""
        return self.is_merged and self.own is None

    @property
    def needs_prediction(self) -> bool:
        """Whether it drafts from the request's prediction."""
        return self.own is Drafter.PREDICTION

    @property
    def reads_text(self) -> bool:
        """Whether its counts are made from a text that the worker is started with."""
        return self in (Drafter.UNIGRAM, Drafter.BIGRAM)

    def merged(self) -> Drafter:
        """Return the drafter that merges this one (a drafter in the target, or MODEL) with draft workers."""
        return Drafter(f"{self}{_BESIDE.value}model")


TABLE_DRAFTERS = (Drafter.NGRAM, Drafter.LOOKUP, Drafter.UNIGRAM, Drafter.BIGRAM)
"""Drafters from counts of tokens, which need no model: a draft worker without a model runs one of them."""
