"""PaSS (Monea et al., 2023, 2311.13581): look-ahead embeddings are fed after each token at which a step may end, and
the logits after them are those of the tokens after the next, all in the same forward.

The paper has two forwards a step; here the ids are nodes of the step's own tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.engine.cuda.host_copy import DeferredCopies
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drawing import propose_by_logits
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.target_drafter import ExtraRows, TargetDrafter
from outrider.engine.token_tree import depths
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.drafters import Drafter
from outrider.wire.errors import ConfigError
from outrider.wire.params import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from outrider.engine.model_runner import ModelRunner


class PassDrafter(TargetDrafter):
    """Proposes by what was said after the look-ahead ids behind a slot's last token but one."""

    def __init__(self, first_id: int, num_ids: int) -> None:
        """first_id: of the look-ahead ids, which follow each other."""
        self._first_id = first_id
        self._num_ids = num_ids
        self._known: dict[SlotKey, tuple[int, int]] = {}
        """Number of committed tokens, and of the tokens after them of which there are logits."""
        self._logits = DeferredCopies[SlotKey]()
        """Of these tokens, [num_tokens, V] float32."""

    @classmethod
    def of(cls, embeddings: str, runner: ModelRunner) -> PassDrafter:
        """Draft by the embeddings that a model was loaded with. Raises ConfigError where it runs no trees."""
        if runner.tree_refusal is not None:
            raise ConfigError(
                f"lookahead_embeddings is {embeddings!r}, and the target runs no token trees on the path "
                f"{runner.path.name}: {runner.tree_refusal}; leave it out, or take another attention_path",
                param="lookahead_embeddings",
            )
        return cls(runner.facts.vocab_size, runner.facts.num_lookahead)

    def commit(self, slot: Slot, num_same: int) -> None:
        committed_len, _ = self._known.get(slot.key, (0, 0))
        if committed_len > num_same:
            self.close(slot.key, is_ended=False)

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        self._known.pop(key, None)
        self._logits.drop(key)

    def has_next(self, slot: Slot) -> bool:
        committed_len, num_tokens = self._known.get(slot.key, (0, 0))
        return committed_len == len(slot.committed) and num_tokens > 0

    def propose(self, slot: Slot, state: SamplingState, shares: SlotShares, max_tokens: int) -> CandidateTree:
        logits = self._logits.get(slot.key) if self.has_next(slot) else None
        rows = None if logits is None else HostLogits(logits)
        return propose_by_logits(slot, state, shares, max_tokens, rows)

    def _num_after(self, slot: Slot, depth: int) -> int:
        """Return how many ids are fed after so many draft tokens: the id at depth j stands for the token after the next
        j, and the target says the output's last one itself.
        """
        return max(0, min(self._num_ids, slot.max_len - 2 - len(slot.committed) - depth))

    def rows_beside(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        """Return the ids one after the other, after the last committed token and after each draft token, the first of
        them where not all have room.
        """
        ids, placed = list[int](), list[int]()
        for node, depth in enumerate([0, *(1 + depth for depth in depths(parents))], start=ROOT):
            num = self._num_after(slot, depth)
            if len(ids) + num > MAX_DRAFT_TOKENS:
                break
            for index in range(num):
                placed.append(len(parents) + len(ids) - 1 if index else node)
                ids.append(self._first_id + index)
        if not ids:
            return None
        return ExtraRows(Drafter.PASS, ids, placed, width=1, depth=self._num_ids)

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        end = path[-1] if path else ROOT
        first = num = 0
        if end in rows.parents:
            first, num = rows.parents.index(end), self._num_after(slot, len(path))
        self._known[slot.key] = (len(slot.committed) + len(path) + 1, num)
        self._logits.add(slot.key, logits[first : first + num])
