"""Chooses the target and the draft of a request. Pure.

Targets: a prompt goes where its beginning went before, so that it finds its prefix cached. That is rendezvous hashing
over the usable targets, with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016): if the load of the hashed target is
clearly above the mean, the request goes to the least loaded target. Drafts: the draft with the fewest requests, then
the one with the shortest round-trip time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX_TOKENS = 256
"""Number of tokens at the beginning of a prompt that are hashed to choose its target."""
BALANCE = 1.25
"""The target that a prompt's hash prefers gets the prompt while its load (0 to 1) is below BALANCE times the mean load
of the targets among which one is chosen, plus SLACK_SLOTS over its number of slots."""
SLACK_SLOTS = 2
"""Number of slots that a target may fill beyond BALANCE times the mean load (as a part of its slots) and still get the
prompts whose hash prefers it."""
FULL_KV_SHARE = 0.95
"""Fraction of its KV blocks in use, 0 to 1, from which a worker counts as full, because a new choice would wait for
memory."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of one usable worker, from which the placement of a choice is decided."""

    name: str
    num_choices: int
    """Number of choices that this gateway placed on the worker, plus the slots that other gateways hold there."""
    num_slots: int
    kv_share: float = 0.0
    """Fraction of the worker's KV blocks in use, 0 to 1."""
    rtt_s: float = 0.0
    is_silent: bool = False
    """Whether the worker has work and has made no step for `member.SILENT_S`. It may soon count as hung."""

    @property
    def share(self) -> float:
        """Load of the worker: the fraction of its slots or of its KV blocks in use, whichever is higher. 1 is full."""
        slot_share = 1.0
        if self.num_slots:
            slot_share = self.num_choices / self.num_slots
        return max(slot_share, self.kv_share)

    @property
    def is_full(self) -> bool:
        """Whether a new choice would have to wait for a slot or for KV blocks."""
        return self.num_choices >= self.num_slots or self.kv_share >= FULL_KV_SHARE


def prefix_key(prompt_ids: Sequence[int], cache_salt: bytes) -> bytes:
    """Return a 16-byte digest of the first PREFIX_TOKENS token ids of a prompt and of its cache salt.

    Requests that may share a cached prefix have the same digest.
    """
    first = array("I", prompt_ids[:PREFIX_TOKENS]).tobytes()
    return hashlib.blake2b(first, digest_size=16, key=hashlib.blake2b(cache_salt, digest_size=32).digest()).digest()


def choose_target(key: bytes, targets: Sequence[WorkerLoad]) -> str | None:
    """Return the name of the target for a prompt with this prefix key; None if `targets` is empty.

    Targets that are neither silent nor full come first. Among these, a hash of `key` and the target's name prefers one.
    It is chosen if its load is below BALANCE times their mean load, plus SLACK_SLOTS over its number of slots;
    otherwise the target with the lowest load is chosen.

        # 4 slots each, 2 choices on A and none on B: the mean load is 0.25, and A keeps its prompts as long as its
        # load, 0.5, is below 1.25 * 0.25 + 2 / 4 = 0.81
    """
    if not targets:
        return None
    best = min((load.is_silent, load.is_full) for load in targets)
    candidates = [load for load in targets if (load.is_silent, load.is_full) == best]
    preferred = max(candidates, key=lambda load: _weight(key, load.name))
    mean = sum(load.share for load in candidates) / len(candidates)
    max_share = BALANCE * mean + SLACK_SLOTS / max(1, preferred.num_slots)
    if preferred.share < max_share:
        return preferred.name
    least_loaded = min(candidates, key=lambda load: (load.share, _weight(key, load.name)))
    return least_loaded.name


def choose_draft(drafts: Sequence[WorkerLoad]) -> str | None:
    """Return the name of the best draft worker with a free slot; None if none has one.

    Silent ones, which have work and have made no step for `member.SILENT_S`, come last. Among the others the one with
    the fewest choices is best, and among equals the one with the shortest round-trip time.
    """
    free = [load for load in drafts if load.num_choices < load.num_slots]
    if not free:
        return None
    best = min(free, key=lambda load: (load.is_silent, load.num_choices, load.rtt_s, load.name))
    return best.name


def _weight(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
