"""The tree that grows in a slot of a draft worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.engine.speculation.drafter import NodeDrafter
from outrider.engine.speculation.growth import CheckCommit
from outrider.engine.speculation.plan import MAX_FED, Plan
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.tree import GrowingTree
from outrider.engine.worker.jobs import JobError
from outrider.engine.worker.slots import BareSlot
from outrider.wire.params import SamplingParams
from outrider.wire.speculation import Speculation

MAX_DISTRIBUTION_BYTES = 64 << 20
"""Bytes of distributions that one slot's tree keeps, in case they are to be sent again."""
BYTES_AN_ID = 20
"""Of a distribution that is kept: a float32 score, an int64 id and a float64 weight."""


class SlotTree(GrowingTree):
    """Implements `Growth`."""

    def __init__(
        self,
        slot: BareSlot,
        speculation: Speculation,
        shares: SlotShares,
        drafter: NodeDrafter[Any],
        topk: int | None,
        num_ids: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """topk: ids to which distributions are cut; None = whole ones, of `num_ids`."""
        self._slot = slot
        self._drafter = drafter
        max_fed = MAX_FED
        if not slot.params.determined:
            max_fed = min(MAX_FED, MAX_DISTRIBUTION_BYTES // (BYTES_AN_ID * (topk or num_ids)))
        plan = Plan(speculation, slot.params, shares, drafter.takes_trees, topk, max_fed=max_fed)
        self._bound_depth(plan)
        super().__init__(slot.committed, slot.max_len, slot.params, plan)

    @classmethod
    def refusal(cls, drafter: NodeDrafter[Any], *, is_translated: bool) -> str | None:
        return None

    @classmethod
    def shares_key(cls, params: SamplingParams) -> object:
        return params.greedy, params.determined

    def check(self, base_len: int, decided: Sequence[int], check_commit: CheckCommit) -> JobError | None:
        return check_commit(self._slot, base_len, decided)

    def continues(self, base_len: int, decided: Sequence[int], *, is_new_lease: bool) -> bool:
        known = self._slot.committed[base_len:]
        return not is_new_lease and known == list(decided[: len(known)])

    def go_on(self, decided: Sequence[int]) -> list[int]:
        self._slot.commit_from(self.committed_len, decided)
        self._bound_depth(self.plan)
        return self.advance(decided)

    def _bound_depth(self, plan: Plan) -> None:
        """Let no node be deeper than drafter and slot have something to say of."""
        bounds = [bound for bound in (self._drafter.max_depth, self._slot.most_depth) if bound is not None]
        plan.bound_depth(min(bounds, default=None))
