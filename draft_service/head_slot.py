"""Slots of drafts that need rows of the target's features beside the ids. On the engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from draft_service.feature_rows import FeatureRows
from draft_service.jobs import Rows
from outrider.engine.kv_pool import KVPool
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import BareSlot, Slot
from outrider.wire.params import SamplingParams


def as_tensor(rows: Rows) -> Tensor:
    """Return rows as bfloat16, of the same shape."""
    return torch.from_numpy(np.array(rows).view(np.int16)).view(torch.bfloat16)  # what came cannot be written to


@runtime_checkable
class TakesRows(Protocol):
    """A slot that the target sends rows for."""

    @property
    def next_row(self) -> int:
        """Position of the first row that is of use."""

    @property
    def lacks_rows(self) -> bool:
        """Whether what is committed cannot be gone on from for want of rows."""

    request_id: int
    """Of what is asked for; another one once what was here was lost."""

    def take_rows(self, start: int, rows: Rows, request_id: int) -> None:
        """Take in rows of consecutive positions from `start` on. They may be late, repeated, or begin behind what is
        needed: where they answer the present request, what is before them is not to be had, or was too much.
        """


class HeadSlot(Slot):
    """Caches what an EAGLE head makes of each token together with the target's row of the token before it. The cache
    begins at the first token before which there is a row. Entries of guesses are made from the head's own output in
    place of rows: they are of use as long as the guesses come true, and are made anew once they do not.
    """

    __slots__ = ("request_id", "rows")

    lag: ClassVar[int] = 1
    """Tokens by which an entry is behind its row."""

    def __init__(
        self,
        width: int,
        key: SlotKey,
        committed_ids: Sequence[int],
        num_prompt: int,
        params: SamplingParams,
        pool: KVPool,
        cache_salt: bytes = b"",
    ) -> None:
        super().__init__(key, committed_ids, num_prompt, params, pool, cache_salt)
        self.first = self.lag
        self.rows = FeatureRows(width)
        self.request_id = 1
        if self.lag:
            self._salt += self.committed[0].to_bytes(4)  # of it there is no entry, and all rows depend on it

    @property
    def next_row(self) -> int:
        return self.first + self._num_agreed - self.lag

    @property
    def lacks_rows(self) -> bool:
        return self.rows.end < len(self.committed) - 1

    @property
    def num_feedable(self) -> int:
        return max(0, min(len(self.committed) - 1, self.rows.end) + self.lag - self.first)

    def features_of(self, num_tokens: int) -> Tensor:
        return as_tensor(self.rows.of(self.first + len(self.cached) - self.lag, num_tokens))

    def take_rows(self, start: int, rows: Rows, request_id: int) -> None:
        if self.rows.take(start, rows) or request_id != self.request_id:
            return
        if not self.cached and self.first == self.lag:
            self.adopt()  # another slot may have left what lies before
        if not self.rows.take(start, rows):
            self._crop(0)
            self.first = start + self.lag
            self.rows.begin(start, rows)

    def reconcile(self) -> int:
        """Crop the cache to what was made of committed tokens and the target's rows; return its length."""
        self._crop(min(self._num_agreed, len(self.committed) - 1 - self.first))
        return len(self.cached)

    def rebased(self, start: int, ids: Sequence[int]) -> None:
        self.cached[start:] = ids

    def fed_committed(self, ids: Sequence[int]) -> None:
        super().fed_committed(ids)
        self.rows.drop(self.next_row)

    def adopt(self) -> int:
        num_tokens = super().adopt() if self.first == self.lag else 0
        self.rows.drop(self.next_row)
        return num_tokens

    def publish(self) -> None:
        """Let others adopt what begins at the beginning: the same ids then have the same rows."""
        if self.first == self.lag:
            super().publish()

    def _crop(self, num_cached: int) -> int:
        num_freed = super()._crop(max(0, num_cached))
        if self.next_row < self.rows.start:  # they were let go when they had been made use of
            self.request_id += 1
            self.rows.begin(self.next_row, self.rows.of(self.rows.start, 0))
        return num_freed


class ContextSlot(HeadSlot):
    """Caches what a head that fills blocks makes of the rows themselves, of each token before the last committed one:
    the block behind them begins with that, and leaves nothing.
    """

    __slots__ = ()

    lag: ClassVar[int] = 0


class RowSlot(BareSlot):
    """Keeps the newest row, from which heads say all that follows."""

    __slots__ = ("_position", "_row", "request_id")

    def __init__(
        self,
        key: SlotKey,
        committed_ids: Sequence[int],
        num_prompt: int,
        params: SamplingParams,
        cache_salt: bytes = b"",
    ) -> None:
        super().__init__(key, committed_ids, num_prompt, params)
        self.request_id = 0
        self._position = -1
        self._row: Rows = np.empty((0, 0), dtype=np.uint16)

    @property
    def next_row(self) -> int:
        return len(self.committed) - 2

    @property
    def lacks_rows(self) -> bool:
        return self._position < self.next_row

    @property
    def row(self) -> Rows | None:
        """Return the row [width] of the token before the last committed one; None until it has come."""
        return self._row if self._position == self.next_row else None

    def take_rows(self, start: int, rows: Rows, request_id: int) -> None:
        if start + len(rows) - 1 > self._position:
            self._position, self._row = start + len(rows) - 1, rows[-1].copy()  # not all that came with it
