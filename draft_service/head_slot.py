"""Slots of heads: they need features of the target's beside token ids. On the engine thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from draft_service.jobs import Rows
from outrider.engine.heads.feature_buffer import FeatureBuffer
from outrider.engine.worker.slots import Slot, needs_prefill

MAX_FEATURE_BYTES = 64 << 20
"""Bytes of a slot's features that wait to be used; a head that is further behind begins anew with the newest."""


def as_tensor(rows: Rows) -> Tensor:
    """Return writable bits of bfloat16 numbers as these numbers, of the same shape."""
    return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)


class HeadSlot(Slot):
    """Caches what a head makes of each token and a feature: that of the token itself, or of the token before it.

    The cache begins at the first token whose feature there is. A head without a cache reads the newest feature alone.
    Entries of draft tokens are made from the head's own outputs in place of features: they are of use as long as the
    draft tokens come true, and are made anew once they do not.
    """

    __slots__ = ("features", "keeps_cache", "lag", "request_id")

    def __init__(self, width: int, lag: int, *slot: Any, keeps_cache: bool = True, **more: Any) -> None:
        """width: numbers of a feature. lag: tokens by which an entry is behind the token of its feature, 0 or 1. slot,
        more: as `Slot` takes them.
        """
        super().__init__(*slot, **more)
        self.lag = lag
        self.keeps_cache = keeps_cache
        self.first = lag
        self.features = FeatureBuffer(2 * width)
        self.request_id = 1
        """Of the features that are asked for; another one once what was here was lost."""
        if lag:
            self._salt += self.committed[0].to_bytes(4)  # of it there is no entry, and all features depend on it

    @property
    def next_position(self) -> int:
        """Position of the first feature that is of use."""
        return self.first + self._num_agreed - self.lag

    @property
    def lacks_features(self) -> bool:
        """Whether what is committed cannot be gone on from for want of features."""
        return self.features.end < len(self.committed) - 1

    @property
    def num_feedable(self) -> int:
        return max(0, min(len(self.committed) - 1, self.features.end) + self.lag - self.first)

    def features_of(self, num_tokens: int) -> Tensor:
        start = self.first + len(self.cached) - self.lag
        data = np.frombuffer(self.features.read(start, start + num_tokens), dtype=np.uint16)
        return as_tensor(data.reshape(num_tokens, self.features.token_bytes // 2))

    def take_features(self, start: int, rows: Rows, request_id: int) -> None:
        """Take in features of consecutive positions from `start` on. They may be late, repeated, or begin behind what
        is needed: where they answer the present request, what is before them is not to be had, or was too much.
        """
        if self._append(start, rows) or request_id != self.request_id:
            return
        if not self.cached:
            self.adopt()  # another slot may have left what lies before
        if not self._append(start, rows):
            self._crop(0)
            self.first = start + self.lag
            self.features.clear(start)
            self.features.put(start, rows.tobytes())

    def _append(self, start: int, rows: Rows) -> bool:
        """Take in what is new of features. Return False, with nothing taken, where some between these and what is here
        are missing, or too many would wait.
        """
        features = self.features
        new = rows[max(0, features.end - start) :]
        if start > features.end or (len(new) and features.num_bytes + new.nbytes > MAX_FEATURE_BYTES):
            return False
        features.put(features.end, new.tobytes())
        return True

    def settle(self) -> None:
        if not self.keeps_cache:
            self.first = max(self.lag, len(self.committed) - 1)
        super().settle()

    def _agreeing(self, limit: int) -> int:
        """Return how many of the first `limit` entries were made of committed tokens and the target's features: those
        of draft tokens were not, whichever these were.
        """
        return max(0, min(self._num_agreed, limit))

    def adopt(self) -> int:
        num_tokens = super().adopt() if self.first == self.lag else 0
        self.features.drop_before(self.next_position)
        return num_tokens

    def publish(self) -> None:
        """Let others adopt what begins at the beginning: the same ids then have the same features. Those that were made
        use of go.
        """
        if self.first == self.lag:
            super().publish()
        self.features.drop_before(self.next_position)

    def _crop(self, num_cached: int) -> int:
        num_freed = super()._crop(num_cached)
        if self.next_position < self.features.start:  # they were dropped when they had been made use of
            self.request_id += 1
            self.features.clear(self.next_position)
        return num_freed


def is_fed(slot: Slot) -> bool:
    """Return whether all that a draft needs of the committed tokens is here, and no prompt has to be read."""
    if isinstance(slot, HeadSlot) and (len(slot.committed) <= slot.first or slot.lacks_features):
        return False
    return not needs_prefill(slot)
