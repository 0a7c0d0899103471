"""The jobs that a servicer submits to an engine thread, and their results. Plain values: no protobuf, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from outrider.drafting.translation import Translation
from outrider.engine.sampling.grammar_state import Grammar, Grammars
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import Speculation

MAX_NARROW = 16
"""Maximum number of uncached tokens that are fed within a decode or verify; more are prefilled, in chunks."""

SlotKey = tuple[int, int]
"""(owner, slot id). An owner is one Control stream of a gateway."""


class JobFault(Enum):
    """The reason why a job failed. The servicers translate it to WorkerErrorCode."""

    UNKNOWN_SLOT = auto()
    BEHIND = auto()
    STALE_EPOCH = auto()
    EXHAUSTED = auto()
    INVALID = auto()
    INTERNAL = auto()
    CANCELLED = auto()
    DRAINING = auto()
    GRAMMAR = auto()


@dataclass(frozen=True, slots=True)
class JobError:
    """The answer to a job that failed."""

    fault: JobFault
    message: str
    known_len: int = 0
    """Number of the slot's committed tokens in this worker; set with BEHIND only."""


def check_range(name: str, value: int, low: int, high: int) -> JobError | None:
    """Return an INVALID error when the field `name` is outside `low` to `high` inclusive, else None."""
    if low <= value <= high:
        return None
    return JobError(JobFault.INVALID, f"{name} is {value}, must be from {low} to {high}")


@dataclass(frozen=True, slots=True)
class SlotOpened:
    """The answer to an `OpenJob`."""

    committed_len: int


@dataclass(frozen=True, slots=True)
class SlotVocabulary:
    """The vocabulary of the tokens in a slot's messages."""

    size: int
    """Width of the logits."""
    eos_token_ids: tuple[int, ...]
    grammars: Grammars
    translation: Translation | None = None
    """Map between these tokens and the model's; None where they are the same."""


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that opens a slot with committed tokens."""

    owner: int
    slot_id: int
    committed_ids: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    respond: Callable[[SlotOpened | JobError], None]
    """Answers the message; on a draft it also takes later errors of the slot."""
    cache_salt: bytes = b""
    corpus_id: bytes = b""
    """Id of the corpus of ended outputs that `lookup` copies from; empty for none."""
    deliver_to: str = ""
    """Address of the target's server; draft only."""
    target_epoch: int = 0
    """Epoch of that target; draft only."""
    drafter: Drafter | None = None
    """The target's own drafter for the slot; target only."""
    num_prompt_logprobs: int | None = None
    """Number of best ids whose logprobs are returned at each prompt token, besides the token's own; None for no
    logprobs. Target only."""
    prediction_ids: tuple[int, ...] = ()
    """Token ids that the output is predicted to resemble; target only."""
    source_ids: tuple[int, ...] = ()
    """Token ids that the encoder reads; none for decoder-only models."""
    speculation: Speculation = field(default_factory=Speculation)
    """How tokens are drafted for the slot; by default none are."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    grammar: Grammar | None = None
    """The compiled grammar of `params`; None without one, and on a draft that cannot follow it."""
    vocabulary: SlotVocabulary | None = None
    """Vocabulary of the slot's messages; None for the worker's own."""

    @property
    def own_drafters(self) -> tuple[Drafter, ...]:
        """The target's own drafters for the slot, in the order in which they are tried. Not all may be loaded."""
        drafters = list[Drafter]()
        if self.prediction_ids:
            drafters.append(Drafter.PREDICTION)
        if self.drafter is Drafter.AUTO:
            drafters += (Drafter.HEADS, Drafter.NGRAM)
        elif self.drafter is not None:
            drafters.append(self.drafter)
        return tuple(drafters)


@dataclass(frozen=True, slots=True)
class TruncateJob:
    """A job that shortens a slot's cache."""

    owner: int
    slot_id: int
    committed_len: int
    reason: str


@dataclass(frozen=True, slots=True)
class CloseJob:
    """A job that frees a slot."""

    owner: int
    slot_id: int


@dataclass(frozen=True, slots=True)
class CloseOwnerJob:
    """A job that frees all slots of an owner, because its stream ended."""

    owner: int
