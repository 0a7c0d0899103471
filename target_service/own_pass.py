"""PaSS in the target (Monea et al., 2023, 2311.13581): look-ahead embeddings are fed behind each token at which a
step's acceptance may end, and what is said behind them are laws of the tokens after the next, all in the same forward.

The paper has two forwards a step; here the ids are nodes of the step's own tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from outrider.engine.cuda.host_copy import DeferredCopies, to_device
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.token_tree import depths
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.drafters import Drafter
from outrider.wire.errors import ConfigError
from outrider.wire.params import MAX_DRAFT_TOKENS
from outrider.wire.settings.config import TargetConfig
from target_service.chains import chain_of_logits
from target_service.lease import Candidate, Scaffold


class OwnPass:
    """Implements `StepDrafter`: of each slot it knows what was said behind its last token but one."""

    def __init__(self, first_id: int, num_ids: int) -> None:
        """first_id: of the look-ahead ids, which follow each other."""
        self._ids = range(first_id, first_id + num_ids)
        self._said: dict[SlotKey, tuple[int, int]] = {}
        """At how many committed tokens, and of how many tokens after them."""
        self._logits = DeferredCopies[SlotKey]()
        """Of these tokens, [num_tokens, V] float32."""

    def open(self, slot: Slot) -> None:
        self.forget(slot.key)

    def has_next(self, slot: Slot) -> bool:
        known = self._said.get(slot.key)
        return known is not None and known[0] == len(slot.committed) and known[1] > 0

    def candidates(self, slot: Slot, state: SamplingState, shares: SlotShares, most: int) -> Sequence[Candidate]:
        _, num_positions = self._said[slot.key]
        logits = self._logits.get(slot.key)
        assert logits is not None, "nothing is known of the slot"
        return chain_of_logits(slot, state, shares, most, HostLogits(logits), num_positions)

    def scaffold(self, slot: Slot, parents: Sequence[int]) -> Scaffold | None:
        """Return the ids one behind the other, behind the last committed token and behind each draft, the first of them
        where not all have room.
        """
        num_drafts, ids, placed = len(parents), list[int](), list[int]()
        for draft, depth in enumerate([0, *(1 + each for each in depths(parents))], start=-1):
            # the id at depth j stands for the token after the next j, and the target says the answer's last one itself
            own = self._ids[: max(0, slot.max_len - 1 - (len(slot.committed) + depth + 1))]
            if len(ids) + len(own) > MAX_DRAFT_TOKENS:
                break
            first = num_drafts + len(ids)
            placed += [draft, *range(first, first + len(own) - 1)][: len(own)]
            ids += own
        return Scaffold(Drafter.PASS, ids, placed, num_drafts, width=1, depth=len(self._ids)) if ids else None

    def learn(self, slot: Slot, logits: Tensor, path: Sequence[int], scaffold: Scaffold) -> None:
        end, rows = path[-1] if path else -1, list[int]()
        for index, parent in enumerate(scaffold.parents):
            if parent == end:
                rows.append(index)
                end = scaffold.num_drafts + index
        self._said[slot.key] = (len(slot.committed) + len(path) + 1, len(rows))
        self._logits.add(slot.key, logits[to_device(np.array(rows, dtype=np.int64), logits.device)])

    def cut(self, key: SlotKey, end: int) -> None:
        known = self._said.get(key)
        if known is not None and known[0] > end:
            self.forget(key)

    def forget(self, key: SlotKey) -> None:
        self._said.pop(key, None)
        self._logits.drop(key)


def make_own_pass(config: TargetConfig, runner: ModelRunner) -> OwnPass:
    """Return what drafts by the embeddings that the model was loaded with. Raises ConfigError for one without trees."""
    if runner.tree_refusal is not None:
        raise ConfigError(
            f"lookahead_embeddings is {config.lookahead_embeddings!r}, and the target runs no token trees on the path "
            f"{runner.path.name}: {runner.tree_refusal}; leave it out, or take another attention_path",
            param="lookahead_embeddings",
        )
    return OwnPass(runner.facts.vocab_size, runner.facts.num_lookahead)
