"""Propose and its result, and what travels to the target, as plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.engine.worker.jobs import JobError
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.transport.codec import Rows
from outrider.wire.tree_shape import TreeShape


@dataclass(frozen=True, slots=True)
class ProposeJob:
    """Ask for a proposal."""

    owner: int
    slot_id: int
    base_len: int
    committed_ids: tuple[int, ...]
    num_draft_tokens: int
    ticket: int
    encoding: DraftLogprobs
    topk: int
    arrived_s: float
    respond: Callable[[Proposed | JobError], None]
    tree: TreeShape | None = None
    """None = a chain of num_draft_tokens, which else is the most nodes that it may have."""
    min_confidence: float = 0.0
    """The chain ends with the token at which the probability of all its tokens falls below this."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """The result of a proposal."""

    draft_ids: tuple[int, ...]
    queue_s: float
    compute_s: float
    payload_bytes: int
    encoding: str
    """ "ids", "full" or "topk"."""
    num_fed_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the slot found in the prefix cache when it first began."""


@dataclass(frozen=True, slots=True)
class PartOut:
    """Part of a proposal on its way to the target at `address`."""

    address: str
    ticket: int
    target_epoch: int
    committed_len: int
    start: int
    draft_ids: tuple[int, ...]
    rows: Rows | None
    num_draft_tokens: int
    parents: tuple[int, ...] = ()
    """Parents of a tree's nodes, as many as draft_ids."""
