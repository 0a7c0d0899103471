"""Drafters as users name them: which drafter of the target's own drafts, and when a draft worker does.

This is the one table of their names: requests, settings, the SDK and the wire all carry a `Drafter`, its label.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Self

from outrider.wire.errors import InvalidRequest

GRAMMAR = "grammar"
"""Stands for a drafter where the request's grammar left no choice: its label in logs, series and answers."""
_MAX_SHOWN_CHARS = 100
"""Characters of an unknown label that an error shows."""


class DraftWorkerUse(Enum):
    """When draft workers draft. The values are the marks in labels."""

    NEVER = ""
    OR = "+"
    """Always. A step verifies its draft tokens or those of the target's own drafter: those that promise more."""
    BESIDE = "&"
    """Always, and their draft tokens lie in one merged tree with the other drafter's."""
    IF_ANY = "?"
    """As OR, and nothing is missing without one."""


def _started_with(setting: str) -> str:
    return f"takes a target started with --{setting} (outrider up --target-{setting})"


_NEVER, _OR, _BESIDE, _IF_ANY = DraftWorkerUse
_TEXT = _started_with("drafter-text FILE")
_TREES = "takes a model and an attention_path that run token trees"


class Drafter(StrEnum):
    """Who proposes draft tokens. None of them changes the output's law.

    Each is a drafter of the target's own, or none, and the use of draft workers. The label says both: `ngram`,
    `ngram+model`, `ngram&model`; without a drafter of the target's own `model` and `model&model`. `auto` is all that
    is there.
    """

    draft_worker: DraftWorkerUse
    remedy: str
    """Ends the refusal of a drafter that is not offered: what offers it. Empty where that goes without saying."""
    _own_label: str | None

    def __new__(cls, own_label: str | None, draft_worker: DraftWorkerUse = _NEVER, remedy: str = "") -> Self:
        label = own_label or "model"
        if draft_worker is _BESIDE or (own_label and draft_worker is _OR):
            label += f"{draft_worker.value}model"
        drafter = str.__new__(cls, label)
        drafter._value_ = label
        drafter._own_label = own_label
        drafter.draft_worker = draft_worker
        drafter.remedy = f"; {label} {remedy}" if remedy else ""
        return drafter

    AUTO = "auto", _IF_ANY
    """Whoever promises the most tokens in each step, of those that are there: the request's prediction, the target's
    heads, NGRAM, a draft worker."""
    MODEL = None, _OR
    """A draft worker."""
    NGRAM = "ngram"
    """The target, from what followed the last tokens in the sequence itself."""
    LOOKUP = "lookup"
    """The target, from where the most of the last tokens came before, in the sequence or in recent answers."""
    UNIGRAM = "unigram", _NEVER, _TEXT
    """The target, from how often tokens come in a text that it was started with."""
    BIGRAM = "bigram", _NEVER, _TEXT
    """The target, from how often tokens follow each other in that text."""
    HEADS = "heads", _NEVER, _started_with("heads FOLDER")
    """The target, by Medusa's or blockwise heads that it was started with."""
    LOOKAHEAD = "lookahead", _NEVER, _TREES
    """The target, by n-grams that it writes beside its text."""
    PASS = "pass", _NEVER, _started_with("lookahead-embeddings FILE")
    """The target, by look-ahead embeddings that it was started with."""
    NGRAM_MODEL = "ngram", _OR
    """NGRAM or a draft worker, whichever promises more tokens in the step."""
    LOOKUP_MODEL = "lookup", _OR
    LOOKAHEAD_MODEL = "lookahead", _OR, _TREES
    PREDICTION = "prediction"
    """The target, from the request's prediction, where the answer goes along with it."""
    PREDICTION_MODEL = "prediction", _OR
    NGRAM_AND_MODEL = "ngram", _BESIDE, _TREES
    """NGRAM and a draft worker, both in one tree."""
    LOOKUP_AND_MODEL = "lookup", _BESIDE, _TREES
    MODEL_AND_MODEL = None, _BESIDE, "takes two pools of drafts, and a target that runs token trees"
    """A draft worker of each pool of drafts, all in one tree."""

    @classmethod
    def parse(cls, label: str, name: str = "drafter") -> Drafter:
        """Return the drafter of a label, in which a bar may stand for the plus. Raises InvalidRequest, naming the field
        `name`, for any other text.
        """
        try:
            return cls(label)
        except ValueError:
            raise InvalidRequest(
                f"{name} is {label[:_MAX_SHOWN_CHARS]!r}, must be one of {', '.join(cls)}", param=name
            ) from None

    @classmethod
    def _missing_(cls, value: object) -> Drafter | None:
        label = value.replace("|", "+") if isinstance(value, str) else value
        return next((drafter for drafter in cls if drafter.value == label), None)

    @property
    def own(self) -> Drafter | None:
        """The drafter that drafts in the target, or None: of `ngram+model` NGRAM."""
        return None if self._own_label is None else Drafter(self._own_label)

    @property
    def asks_draft_worker(self) -> bool:
        return self.draft_worker is not _NEVER

    @property
    def needs_draft_worker(self) -> bool:
        return self.draft_worker in (_OR, _BESIDE)

    @property
    def is_merged(self) -> bool:
        """Whether the draft tokens of all its parts lie in one tree."""
        return self.draft_worker is _BESIDE

    @property
    def needs_pools(self) -> bool:
        """Whether a draft worker of each of several pools drafts."""
        return self.is_merged and self.own is None

    @property
    def needs_prediction(self) -> bool:
        return self.own is Drafter.PREDICTION

    @property
    def reads_text(self) -> bool:
        """Whether it counts in a text that the worker is started with."""
        return self in (Drafter.UNIGRAM, Drafter.BIGRAM)

    def merged(self) -> Drafter:
        """Return this drafter of the target's own, or a draft worker, merged with draft workers."""
        return Drafter(f"{self}{_BESIDE.value}model")


TABLE_DRAFTERS = (Drafter.NGRAM, Drafter.LOOKUP, Drafter.UNIGRAM, Drafter.BIGRAM)
"""Those that draft from counts of tokens: a draft worker without a model is one of them."""
