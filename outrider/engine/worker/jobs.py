"""The jobs that a servicer submits to an engine thread, and their results, as plain values: no protobuf, no tensors."""

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
"""Maximum number of uncached tokens of a slot that are fed together with its decode or verify. If there are more, they
are prefilled first, in chunks."""

SlotKey = tuple[int, int]
"""(owner, slot id). The owner is the number of a gateway's Control stream."""


class JobFault(Enum):
    """Reason why a job failed. The servicers translate it to WorkerErrorCode."""

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
    """Answer to a job that failed."""

    fault: JobFault
    message: str
    committed_len: int = 0
    """Number of the slot's committed tokens in this worker; set only with the fault BEHIND."""


def check_range(name: str, value: int, low: int, high: int) -> JobError | None:
    """Return an INVALID error if the value of the field `name` is outside `low` to `high`, both included; else None."""
    if low <= value <= high:
        return None
    return JobError(JobFault.INVALID, f"{name} is {value}, must be from {low} to {high}")


@dataclass(frozen=True, slots=True)
class SlotOpened:
    """Answer to an `OpenJob` that succeeded."""

    committed_len: int


@dataclass(frozen=True, slots=True)
class SlotVocabulary:
    """Vocabulary to which the token ids in the messages about one slot belong: the target's."""

    size: int
    """Number of ids in this vocabulary, i.e. the number of logits in a row."""
    eos_token_ids: tuple[int, ...]
    grammars: Grammars
    translation: Translation | None = None
    """Map between this vocabulary's token ids and those of the worker's model; None if they are the same."""


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Job that opens a slot with committed tokens."""

    owner: int
    slot_id: int
    committed_ids: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    respond: Callable[[SlotOpened | JobError], None]
    """Function that answers the OpenSlot message. A draft worker also calls it with later errors of the slot."""
    cache_salt: bytes = b""
    corpus_id: bytes = b""
    """Id of the corpus of ended outputs that the drafter `lookup` copies from; empty for none."""
    target_address: str = ""
    """Address of the target to which draft tokens are sent. Draft worker only."""
    target_epoch: int = 0
    """Epoch of the target at `target_address`. Draft worker only."""
    drafter: Drafter | None = None
    """The target's own drafter that the request names, or `auto`; None if it names none. Target only."""
    num_prompt_logprobs: int | None = None
    """Number of likeliest ids whose log-probs are returned for each prompt token, besides the token's own; None for no
    log-probs of the prompt. Target only."""
    prediction_ids: tuple[int, ...] = ()
    """Token ids of the request's prediction of its output; empty without one. Target only."""
    source_ids: tuple[int, ...] = ()
    """Token ids of the encoder's input; empty for models without an encoder."""
    speculation: Speculation = field(default_factory=Speculation)
    """Speculation settings of the request; by default nothing is drafted."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    grammar: Grammar | None = None
    """The grammar whose source `params` has, compiled. None if the request has no grammar, and in a draft worker that
    cannot follow it."""
    vocabulary: SlotVocabulary | None = None
    """Vocabulary of the token ids in the slot's messages; None if it is the vocabulary of the worker's own model."""

    @property
    def own_drafters(self) -> tuple[Drafter, ...]:
        """The target's own drafters that the request allows, in the order in which they are tried. The target may not
        have loaded all of them.
        """
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
    """Job that shortens a slot's cache."""

    owner: int
    slot_id: int
    committed_len: int
    reason: str


@dataclass(frozen=True, slots=True)
class CloseJob:
    """Job that frees a slot."""

    owner: int
    slot_id: int


@dataclass(frozen=True, slots=True)
class CloseOwnerJob:
    """Job that frees all slots of an owner, i.e. of one Control stream of a gateway, because the stream ended."""

    owner: int
