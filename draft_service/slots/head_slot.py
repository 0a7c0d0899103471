"""Slots of heads, which need the target's features besides token ids. Runs on the engine thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from draft_service.slot_jobs import FeatureBits
from outrider.engine.feature_buffer import FeatureBuffer
from outrider.engine.worker.slots import Slot, needs_prefill

MAX_FEATURE_BYTES = 64 << 20
"""Maximum bytes of features that a slot keeps until its head reads them. If more arrive, the slot drops the kept ones,
empties its cache, and goes on from the newest features."""


def as_tensor(data: FeatureBits) -> Tensor:
    """Return features as a bfloat16 tensor of the same shape, which shares the memory of `data`. `data` must be
    writable.
    """
    return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)


class HeadSlot(Slot):
    """Slot of a head: a cache entry for each token, computed from the token and a feature.

    The feature is that of the token itself (`lag` 0) or of the token before it (`lag` 1). The cache begins at the first
    token for which this feature is known. A head without a cache reads only the newest feature. Entries of draft tokens
    are computed from the head's own outputs in place of features. As long as the draft tokens are accepted, these
    entries stay; after a rejection they are computed again from features.

        # lag 1, 4 committed tokens, features of positions 0 and 1: tokens 1 and 2 can be fed (`num_feedable` is 2)
    """

    __slots__ = ("features", "has_cache", "lag", "request_id")

    def __init__(self, width: int, lag: int, *slot: Any, has_cache: bool = True, **more: Any) -> None:
        """Create a slot. `slot`, `more`: arguments of `Slot`.

        `width`: number of elements of a feature. `lag`: 0 if a token's cache entry is computed from the token's own
        feature, 1 if from that of the token before. `has_cache`: whether the head has a cache.
        """
        super().__init__(*slot, **more)
        self.lag = lag
        self.has_cache = has_cache
        self.first = lag
        self.features = FeatureBuffer(2 * width)
        self.request_id = 1
        """Number of the slot's last request to the target for features. It grows by one when the slot loses features
        that it had received."""
        if lag:
            self._salt += self.committed[0].to_bytes(4)  # the first token has no entry, and all features depend on it

    @property
    def next_position(self) -> int:
        """Position of the token whose feature the slot needs next."""
        return self.first + self._num_agreed - self.lag

    @property
    def is_missing_features(self) -> bool:
        """Whether the slot lacks features that it needs to draft after its committed tokens."""
        return self.features.end < len(self.committed) - 1

    @property
    def num_feedable(self) -> int:
        return max(0, min(len(self.committed) - 1, self.features.end) + self.lag - self.first)

    def features_of(self, num_tokens: int) -> Tensor:
        """Return the features with which the slot's next num_tokens tokens are fed, [num_tokens, d] bfloat16."""
        start = self.first + len(self.cached) - self.lag
        data = np.frombuffer(self.features.read(start, start + num_tokens), dtype=np.uint16)
        return as_tensor(data.reshape(num_tokens, self.features.feature_bytes // 2))

    def store_features(self, start: int, data: FeatureBits, request_id: int) -> None:
        """Store features of consecutive tokens, which may come late or twice.

        `start`: position of the first token. `data`: the features. `request_id`: number of the slot's request for
        features to which the target replies with them.

        If features before `start` were lost, or the slot would keep more than MAX_FEATURE_BYTES, `data` cannot be
        appended. Then the slot empties its cache and begins again at `start`, or drops `data` if they are the reply to
        an earlier request than its last one.
        """
        if self._append(start, data) or request_id != self.request_id:
            return
        if not self.cached:
            self.adopt()  # another slot may have published the tokens before
        if not self._append(start, data):
            self._crop(0)
            self.first = start + self.lag
            self.features.clear(start)
            self.features.put(start, data.tobytes())

    def _append(self, start: int, data: FeatureBits) -> bool:
        features = self.features
        new = data[max(0, features.end - start) :]
        if start > features.end or (len(new) and features.num_bytes + new.nbytes > MAX_FEATURE_BYTES):
            return False
        features.put(features.end, new.tobytes())
        return True

    def settle(self) -> None:
        if not self.has_cache:
            self.first = max(self.lag, len(self.committed) - 1)
        super().settle()

    def _agreeing(self, limit: int) -> int:
        return max(0, min(self._num_agreed, limit))

    def adopt(self) -> int:
        num_tokens = 0
        if self.first == self.lag:  # the cache begins at the first token, as a published one does
            num_tokens = super().adopt()
        self.features.drop_before(self.next_position)
        return num_tokens

    def publish(self) -> None:
        """Let other slots use this slot's cache (prefix caching), and drop features that have been used.

        All entries of a cache depend on where it begins. So a cache is shared only if it begins at the first position
        that can have an entry: 0, or 1 if entries need the feature of the token before.
        """
        if self.first == self.lag:
            super().publish()
        self.features.drop_before(self.next_position)

    def _crop(self, num_cached: int) -> int:
        num_freed = super()._crop(num_cached)
        if self.next_position < self.features.start:  # they were dropped after use
            self.request_id += 1
            self.features.clear(self.next_position)
        return num_freed


def is_fed(slot: Slot) -> bool:
    """Return whether a slot can draft now: it has all the features that it needs, and its prompt is prefilled."""
    if isinstance(slot, HeadSlot) and (len(slot.committed) <= slot.first or slot.is_missing_features):
        return False
    return not needs_prefill(slot)
