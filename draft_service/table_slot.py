"""A slot of a draft without a model: a follower of what is committed, and no cache."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.drafter import Drafter
from outrider.engine.open_slots import BareSlot
from outrider.engine.scheduler import SlotKey
from outrider.wire.params import SamplingParams


class TableSlot(BareSlot):
    __slots__ = ("_is_sound", "follower")

    def __init__(
        self,
        drafter: Drafter,
        key: SlotKey,
        committed_ids: Sequence[int],
        num_prompt: int,
        params: SamplingParams,
        cache_salt: bytes = b"",
    ) -> None:
        super().__init__(key, committed_ids, num_prompt, params)
        self._is_sound = True
        self.follower = drafter.open(self.committed, num_prompt, cache_salt)

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        super().commit_from(base_len, ids)
        self.follower.truncate(base_len)
        self.follower.append(ids)

    def give_up(self) -> int:
        """The slot has been closed: its drafter may remember what was said in it."""
        if self._is_sound:
            self.follower.close()
        return 0

    def make_way(self) -> int:
        """What was said in it is in the slot that comes: remembered once, at the end."""
        return 0

    def distrust(self) -> None:
        """What the follower holds may be wrong: nothing of it is to be remembered."""
        self._is_sound = False
