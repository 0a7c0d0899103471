"""`Drafter`, the enum of drafters. Its values are the labels that users write, such as `ngram+model`: a drafter in the
target, and a use of draft workers. Requests, settings, SDK and messages all use these labels.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Self

from outrider.wire.errors import InvalidRequest

GRAMMAR = "grammar"
"""Label in logs, metrics and replies for draft tokens that were proposed because the request's grammar allows no other
token."""
_MAX_SHOWN_CHARS = 100
"""Maximum number of characters of an unknown label that an error quotes."""


class DraftWorkerUse(Enum):
    """Whether draft workers draft for a request, and how their draft tokens are combined with those of the target's own
    drafter. The value is the character for it in a drafter's label, such as `+` in ngram+model.
    """

    NEVER = ""
    OR = "+"
    """Draft workers draft all the time. In each step the target compares their draft tokens with those of its own
    drafter, and verifies the ones with the higher expected number of accepted tokens."""
    MERGED = "&"
    """Draft workers draft all the time. Their draft tokens and those of the target's own drafter form one merged tree,
    which a step verifies."""
    IF_ANY = "?"
    """If a draft worker is connected, each step verifies its draft tokens or those of the target's own drafter,
    whichever promise more accepted tokens. If none is, only the target's own drafter drafts for the request."""


def _started_with(setting: str) -> str:
    return f"takes a target started with --{setting} (outrider up --target-{setting})"


_NEVER = DraftWorkerUse.NEVER
_OR = DraftWorkerUse.OR
_BESIDE = DraftWorkerUse.MERGED
_IF_ANY = DraftWorkerUse.IF_ANY
_TEXT = _started_with("drafter-text FILE")
_TREES = "takes a model and an attention_path that run token trees"


class Drafter(StrEnum):
    """What proposes draft tokens for a request. No drafter changes the distribution of the output.

    A value of this class combines up to two parts: a drafter that runs in the target, and draft workers. The label
    shows the parts: `ngram` runs in the target only, `ngram+model` and `ngram&model` use both, `model` and
    `model&model` use draft workers only. `auto` stands for all drafters that are available.
    """

    draft_worker: DraftWorkerUse
    remedy: str
    """Text at the end of an error that this drafter is not available: how to make it available. May be empty."""
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
    """All available drafters: the request's prediction, the target's heads, NGRAM and draft workers. Each step uses the
    one with the highest expected number of accepted tokens."""
    MODEL = None, _OR
    """A draft worker. It proposes tokens by the model, head or table that it was started with."""
    NGRAM = "ngram"
    """Runs in the target. It proposes the tokens that most often followed the sequence's last tokens earlier in the
    sequence."""
    LOOKUP = "lookup"
    """Runs in the target. It finds the longest earlier occurrence of the sequence's last tokens, in the sequence itself
    or in recent outputs of other requests, and copies the tokens that followed there."""
    UNIGRAM = "unigram", _NEVER, _TEXT
    """Runs in the target. It proposes the most frequent tokens of a text file that the target was started with."""
    BIGRAM = "bigram", _NEVER, _TEXT
    """Runs in the target. It proposes the tokens that most often follow the last token in a text file that the target
    was started with."""
    HEADS = "heads", _NEVER, _started_with("heads FOLDER")
    """Runs in the target: Medusa heads, or blockwise heads (Stern et al. 2018), with which it was started."""
    LOOKAHEAD = "lookahead", _NEVER, _TREES
    """Runs in the target. It is lookahead decoding (Fu et al.): the target makes n-grams in additional rows of its own
    steps."""
    PASS = "pass", _NEVER, _started_with("lookahead-embeddings FILE")
    """Runs in the target. It is PaSS, with the look-ahead embeddings that the target was started with."""
    NGRAM_MODEL = "ngram", _OR
    """N-grams and a draft worker. Each step uses the one with the higher expected number of accepted tokens."""
    LOOKUP_MODEL = "lookup", _OR
    LOOKAHEAD_MODEL = "lookahead", _OR, _TREES
    PREDICTION = "prediction"
    """Runs in the target. It copies the request's prediction for as long as the output follows it."""
    PREDICTION_MODEL = "prediction", _OR
    NGRAM_AND_MODEL = "ngram", _BESIDE, _TREES
    """N-grams and a draft worker. Their draft tokens form one merged tree."""
    LOOKUP_AND_MODEL = "lookup", _BESIDE, _TREES
    MODEL_AND_MODEL = None, _BESIDE, "takes two pools of drafts, and a target that runs token trees"
    """One draft worker of each pool of draft workers; their draft tokens form one merged tree."""

    @classmethod
    def parse(cls, label: str, name: str = "drafter") -> Drafter:
        """Return the drafter with a label such as `ngram+model`, where `|` may stand for `+`. name: name of the
        parameter, for errors. Raises InvalidRequest for a text that is not a label.
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
        """The drafter that runs in the target as a part of this drafter, such as NGRAM for `ngram+model`; None = there
        is none.
        """
        if self._own_label is None:
            return None
        return Drafter(self._own_label)

    @property
    def uses_draft_worker(self) -> bool:
        """Whether a request with this drafter uses a draft worker if one is connected."""
        return self.draft_worker is not _NEVER

    @property
    def needs_draft_worker(self) -> bool:
        """Whether a request with this drafter cannot run if no draft worker is connected."""
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
        """Whether this drafter copies from the request's prediction. A request with this drafter must have one."""
        return self.own is Drafter.PREDICTION

    @property
    def reads_text(self) -> bool:
        """Whether this drafter drafts from counts of tokens, or of pairs of tokens, in a text file. The worker that
        runs it must then be started with `drafter_text`.
        """
        return self in (Drafter.UNIGRAM, Drafter.BIGRAM)

    def merged(self) -> Drafter:
        """Return the drafter that puts this drafter's tokens and those of draft workers into one merged tree, such as
        `ngram&model` for NGRAM. Call it only for MODEL or a drafter that runs in the target.
        """
        return Drafter(f"{self}{_BESIDE.value}model")


TABLE_DRAFTERS = (Drafter.NGRAM, Drafter.LOOKUP, Drafter.UNIGRAM, Drafter.BIGRAM)
"""Drafters that use tables of tokens instead of a model. A draft worker without a model runs one of them."""
