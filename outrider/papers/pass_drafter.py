"""PaSS (Monea et al., 2023, 2311.13581): look-ahead embeddings are fed after each token at which a step may end. The
logits after them predict the tokens after the next one, all in the same forward.

The paper has two forwards per step; here the look-ahead ids are extra rows of the step's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.engine.host_copy import DeferredCopies
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drawing import propose_by_logits
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.speculation.target_drafter import ExtraRows, TargetDrafter
from outrider.engine.token_tree import num_ancestors
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.errors import ConfigError
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from outrider.engine.model_runner import ModelRunner


class PassDrafter(TargetDrafter):
    """Drafter in the target that proposes a chain by look-ahead embeddings (PaSS). Each step feeds the ids of these
    embeddings after every token that it might accept. From the logits after these ids come the draft tokens of the next
    step, which follow the token that the target draws in this one.
    """

    has_extra_rows = True

    def __init__(self, first_id: int, num_ids: int) -> None:
        """Create a drafter. `first_id`: first of `num_ids` consecutive look-ahead ids, i.e. ids of look-ahead
        embeddings.
        """
        self._first_id = first_id
        self._num_ids = num_ids
        self._lengths: dict[SlotKey, int] = {}
        """By slot: the committed length, in tokens, at which its stored logits apply."""
        self._logits = DeferredCopies[SlotKey]()
        """By slot: logits for the tokens after that length, [num_tokens, V] float32."""

    @classmethod
    def of(cls, embeddings: str, runner: ModelRunner) -> PassDrafter:
        """Return a drafter for the look-ahead embeddings with which a model was loaded. Raises `ConfigError` if the
        model cannot run token trees.

        `embeddings`: value of the setting `lookahead_embeddings`, for the error.
        """
        if runner.tree_refusal is not None:
            raise ConfigError(
                f"lookahead_embeddings is {embeddings!r}, and the target runs no token trees on the path "
                f"{runner.path.name}: {runner.tree_refusal}; leave it out, or take another attention_path",
                param="lookahead_embeddings",
            )
        return cls(runner.facts.vocab_size, runner.facts.num_lookahead)

    def commit(self, slot: Slot, num_same: int) -> None:
        if self._lengths.get(slot.key, 0) > num_same:
            self.close(slot.key, is_ended=False)

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        self._lengths.pop(key, None)
        self._logits.drop(key)

    def has_next(self, slot: Slot) -> bool:
        return self._lengths.get(slot.key) == len(slot.committed)

    def propose(self, slot: Slot, state: SamplingState, acceptance: SlotAcceptance, max_tokens: int) -> CandidateTree:
        rows = None
        if self.has_next(slot):  # other slots' logits are copied to the host with these
            logits = self._logits.get(slot.key)
            assert logits is not None, "a length is noted with its logits"
            rows = HostLogits(logits)
        return propose_by_logits(slot, state, acceptance, max_tokens, rows)

    def _num_after(self, slot: Slot, depth: int) -> int:
        """Return the number of look-ahead ids fed after `depth` draft tokens.

        The id at depth j predicts the token after the next j. The target predicts the output's last token itself.
        """
        return max(0, min(self._num_ids, slot.max_len - 2 - len(slot.committed) - depth))

    def extra_rows(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        """Return extra rows with a chain of look-ahead ids after the last committed token and after each draft token,
        without the last chains if they have more than MAX_DRAFT_TOKENS ids in all. None if there are none.

        `parents`: for each draft token of the step, the index of its parent among them, or ROOT.
        """
        ids = list[int]()
        placed = list[int]()
        num_drafts = [0]  # up to each node, ROOT first
        for depth in num_ancestors(parents):
            num_drafts.append(1 + depth)
        for node, num_before in enumerate(num_drafts, start=ROOT):
            num = self._num_after(slot, num_before)
            parent = node
            if len(ids) + num > MAX_DRAFT_TOKENS:
                break
            for index in range(num):
                placed.append(parent)
                parent = len(parents) + len(ids)
                ids.append(self._first_id + index)
        if not ids:
            return None
        return ExtraRows(Drafter.PASS, ids, placed, width=1, depth=self._num_ids)

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        end = ROOT
        if path:
            end = path[-1]
        self.close(slot.key, is_ended=False)
        if end in rows.parents:
            first = rows.parents.index(end)
            self._lengths[slot.key] = len(slot.committed) + len(path) + 1
            self._logits.add(slot.key, logits[first : first + self._num_after(slot, len(path))])
