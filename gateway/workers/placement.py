"""Which target and which draft a request is given. Pure: loads in, a decision out.

Targets: a prompt goes to where its beginning went before, so that it finds its prefix cached: rendezvous hashing over
the usable targets, with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016): a target that holds clearly more than its
share passes the request on to the least loaded. Drafts: the one with the fewest requests, then the nearest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX_TOKENS = 256
"""A prompt's beginning, as far as it decides where the prompt goes."""
BALANCE = 1.25
"""A target may be in use this many times as far as all are on average before affinity yields,"""
SLACK_SLOTS = 2
"""and so many slots more."""
FULL_KV_SHARE = 0.95
"""A target whose KV cache is in use up to here would make a new request wait for memory."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Of one usable worker."""

    name: str
    num_requests: int
    """Placed there by this gateway, and slots that others hold."""
    num_slots: int
    kv_share: float = 0.0
    """KV blocks in use, of all."""
    rtt_s: float = 0.0
    silent: bool = False
    """It has work and shows no sign of life: it may be about to be given up."""

    @property
    def share(self) -> float:
        """Of its slots or of its KV blocks, whichever is scarcer."""
        return max(self.num_requests / self.num_slots if self.num_slots else 1.0, self.kv_share)

    @property
    def full(self) -> bool:
        return self.num_requests >= self.num_slots or self.kv_share >= FULL_KV_SHARE


def prefix_key(prompt_ids: Sequence[int], cache_salt: bytes) -> bytes:
    """Return what requests that may share a cached prefix have in common."""
    first = array("I", prompt_ids[:PREFIX_TOKENS]).tobytes()
    return hashlib.blake2b(first, digest_size=16, key=hashlib.blake2b(cache_salt, digest_size=32).digest()).digest()


def choose_target(key: bytes, targets: Sequence[WorkerLoad]) -> str | None:
    """Return the name, or None when there is none."""
    if not targets:
        return None
    best = min((load.silent, load.full) for load in targets)
    candidates = [load for load in targets if (load.silent, load.full) == best]
    preferred = max(candidates, key=lambda load: _weight(key, load.name))
    mean = sum(load.share for load in candidates) / len(candidates)
    if preferred.share < BALANCE * mean + SLACK_SLOTS / max(1, preferred.num_slots):
        return preferred.name
    return min(candidates, key=lambda load: (load.share, _weight(key, load.name))).name


def choose_draft(drafts: Sequence[WorkerLoad]) -> str | None:
    """Return the name, or None when there is none with a free slot."""
    free = [load for load in drafts if load.num_requests < load.num_slots]
    best = min(free, key=lambda load: (load.silent, load.num_requests, load.rtt_s, load.name), default=None)
    return None if best is None else best.name


def _weight(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
