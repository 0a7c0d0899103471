"""`Drafter`, the enum of drafters. Its values are the labels that users write, such as `ngram+model`: a drafter in the
target, and a use of draft workers. Requests, settings, SDK and messages all use these labels.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Self

from outrider.wire.errors import InvalidRequest

GRAMMAR = "grammar"
"""Label in logs, metrics and replies for draft tokens that the request's grammar forced."""
_MAX_SHOWN_CHARS = 100
"""Maximum number of characters of an unknown label that an error quotes."""


class DraftWorkerUse(Enum):
    """Whether, and how, draft workers draft for a request. The value is the character that stands for it in labels."""

    NEVER = ""
    OR = "+"
    """Draft workers always draft. A step verifies either their draft tokens or those of the drafter in the target,
    whichever have the higher expected number of accepted tokens."""
    MERGED = "&"
    """Draft workers always draft. Their draft tokens and those of the other drafter form one merged tree."""
    IF_ANY = "?"
    """Same as OR if a draft worker is connected. The request also runs without one."""


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

    A member combines a drafter that runs in the target with a use of draft workers; either may be missing. The label
    shows both: `ngram` runs in the target only, `ngram+model` and `ngram&model` use both, `model` and `model&model` use
    draft workers only. `auto` is any drafter that is available.
    """

    draft_worker: DraftWorkerUse
    remedy: str
    """What makes this drafter available, as the end of the error where it is not. Empty = that is obvious."""
    _own_label: str | None
    """Label of the drafter that runs in the target; None = none does."""

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
    """In each step, whichever available drafter has the highest expected number of accepted tokens: the request's
    prediction, the target's heads, NGRAM, or a draft worker."""
    MODEL = None, _OR
    """A draft worker."""
    NGRAM = "ngram"
    """In the target: tokens that followed the sequence's last tokens where these occurred earlier in the sequence."""
    LOOKUP = "lookup"
    """In the target: a copy of what followed the longest earlier occurrence of the sequence's last tokens, in the
    sequence itself or in recent outputs."""
    UNIGRAM = "unigram", _NEVER, _TEXT
    """In the target: the most frequent tokens of a text file that the target was started with."""
    BIGRAM = "bigram", _NEVER, _TEXT
    """In the target: the tokens that most often follow the last token in a text file that the target was started with.
    """
    HEADS = "heads", _NEVER, _started_with("heads FOLDER")
    """In the target: Medusa's or blockwise heads that the target was started with."""
    LOOKAHEAD = "lookahead", _NEVER, _TREES
    """In the target: lookahead decoding, by n-grams that the target makes in additional rows of its steps."""
    PASS = "pass", _NEVER, _started_with("lookahead-embeddings FILE")
    """In the target: PaSS, by look-ahead embeddings that the target was started with."""
    NGRAM_MODEL = "ngram", _OR
    """NGRAM or a draft worker, whichever has the higher expected number of accepted tokens in a step."""
    LOOKUP_MODEL = "lookup", _OR
    LOOKAHEAD_MODEL = "lookahead", _OR, _TREES
    PREDICTION = "prediction"
    """In the target: a copy of the request's prediction, as long as the output follows it."""
    PREDICTION_MODEL = "prediction", _OR
    NGRAM_AND_MODEL = "ngram", _BESIDE, _TREES
    """NGRAM and a draft worker in one merged tree."""
    LOOKUP_AND_MODEL = "lookup", _BESIDE, _TREES
    MODEL_AND_MODEL = None, _BESIDE, "takes two pools of drafts, and a target that runs token trees"
    """One draft worker of each pool of drafts; their draft tokens form one merged tree."""

    @classmethod
    def parse(cls, label: str, name: str = "drafter") -> Drafter:
        """Return the drafter with a label. The label may have `|` in place of `+`. name: name of the parameter, for
        errors. Raises InvalidRequest for a text that is not a label.
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
        """The part of this drafter that runs in the target, such as NGRAM for `ngram+model`; None = there is none."""
        if self._own_label is None:
            return None
        return Drafter(self._own_label)

    @property
    def uses_draft_worker(self) -> bool:
        """Whether this drafter uses a draft worker if one is connected."""
        return self.draft_worker is not _NEVER

    @property
    def needs_draft_worker(self) -> bool:
        """Whether this drafter cannot run without a draft worker."""
        return self.draft_worker in (_OR, _BESIDE)

    @property
    def is_merged(self) -> bool:
        """Whether the draft tokens of several drafters form one merged tree."""
        return self.draft_worker is _BESIDE

    @property
    def needs_pools(self) -> bool:
        """Whether this drafter merges the draft tokens of several pools of draft workers."""
        return self.is_merged and self.own is None

    @property
    def needs_prediction(self) -> bool:
        """Whether this drafter copies from the request's prediction, so that the request must have one."""
        return self.own is Drafter.PREDICTION

    @property
    def reads_text(self) -> bool:
        """Whether this drafter counts tokens in a text file, with which the worker must be started."""
        return self in (Drafter.UNIGRAM, Drafter.BIGRAM)

    def merged(self) -> Drafter:
        """Return the drafter that merges this one with draft workers, such as `ngram&model` for NGRAM. Only for a
        drafter in the target, or MODEL.
        """
        return Drafter(f"{self}{_BESIDE.value}model")


TABLE_DRAFTERS = (Drafter.NGRAM, Drafter.LOOKUP, Drafter.UNIGRAM, Drafter.BIGRAM)
"""Drafters that use tables of tokens instead of a model. A draft worker without a model runs one of them."""
