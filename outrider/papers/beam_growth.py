"""Draft tokens for a beam search in a draft worker: the draft's own beams below the live ones, level by level.

Their sums of log-probs begin with the target's sums, by which the live beams are ranked. After every level that the
target decides, all levels are chosen anew; a node that is chosen again is not fed again.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from outrider.engine.sampling.penalties import LogitRow
from outrider.engine.speculation.beam import BeamLevel, draft_shape
from outrider.engine.speculation.beam_tree import BeamTree
from outrider.engine.speculation.draft_tree import ROOT, remap
from outrider.engine.speculation.growth import CheckCommit, Growth, GrowthSetup
from outrider.engine.speculation.node_drafter import NodeDistribution, NodeDrafter
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import MIN_PROB
from outrider.engine.worker.jobs import JobError, JobFault
from outrider.wire.requests.params import SamplingParams


class BeamGrowth(BeamTree, Growth):
    """Draft tree below the live beams of a beam search, in a draft worker. The gateway's Advance messages bring the
    levels that the target decided.
    """

    def __init__(self, setup: GrowthSetup) -> None:
        slot = setup.slot
        speculation = setup.speculation
        slot.commit_from(slot.num_prompt, ())  # the common prefix of all beams follows from their levels
        super().__init__(slot.committed)
        self._slot = slot
        self._width, self._depth = draft_shape(slot.params, speculation)
        self._is_fixed = speculation.is_fixed
        self._acceptance = setup.acceptance
        self._stop_ids = slot.params.stop_ids(setup.eos_token_ids)
        self._levels: list[list[int]] = []
        """Draft tokens by depth, the best first at each depth."""
        self._sums = self._totals = [0.0]
        """Sums of log-probs of the live beams (`_sums`) and of the nodes of the last level (`_totals`), in nats."""
        self._known: dict[int, list[tuple[int, float]]] = {}
        """By fed node or ROOT: the likeliest tokens after it that end no beam, with their log-probs in nats, best
        first."""

    @classmethod
    def refusal(cls, drafter: NodeDrafter[Any], *, is_translated: bool) -> str | None:
        if drafter.can_refeed and not is_translated:
            return None
        return "this draft does not draft for beam searches; use one that is a model, with the target's tokenizer"

    @classmethod
    def acceptance_key(cls, params: SamplingParams) -> object:
        return "beams", params.beams and params.beams.width

    @property
    def committed_len(self) -> int:
        return self.num_settled

    @property
    def known_len(self) -> int:
        return self.length

    @property
    def roots(self) -> Mapping[int, int]:
        return {node: ROOT - beam for beam, node in enumerate(self.active)}

    @property
    def is_awaited(self) -> bool:
        return self._is_fixed and not self._is_grown

    @property
    def has_drafts(self) -> bool:
        return bool(self._levels)

    @property
    def _is_grown(self) -> bool:
        """Whether another level would be of no use. The target adds one level of its own to those that it accepts."""
        return len(self._levels) >= self._depth or self.length + len(self._levels) >= self._slot.max_len - 1

    @property
    def _frontier(self) -> list[int]:
        if self._levels:
            return self._levels[-1]
        return self.active

    # steps

    def candidates(self, max_num: int) -> list[tuple[float, int]]:
        if self._is_grown:
            return []
        if not self.is_root_fed:
            return [(1.0, ROOT)]
        prob = 1.0
        nodes = self.unfed([*self.inner(), *self.active])
        if not nodes:
            prob = self._acceptance.chain_prob(len(self._levels))
            if self._is_fixed or prob >= MIN_PROB:
                nodes = self.unfed(self._frontier)
        return [(prob, node) for node in nodes[:max_num]]

    def extend(self, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
        assert distribution.best is not None, "a model drafts for a search"
        ids, probs = distribution.best(LogitRow(distribution.state, ()), self._width + len(self._stop_ids))
        known = self._known[distribution.node] = []
        for token_id, prob in zip(ids, probs, strict=True):
            if prob > 0.0 and token_id not in self._stop_ids:
                known.append((token_id, math.log(prob)))

    def finish_step(self) -> None:
        """Add further levels to the draft tree after a step of the draft worker, as long as the distributions after all
        nodes of the last level are known.
        """
        while not self._is_grown and all(node in self._known for node in self._frontier):
            if not self._add_level():
                break
        if self._is_grown and not self.is_end_known:
            self.is_end_known = True
            self.ended.append(self.active[0])

    def _add_level(self) -> bool:
        above = self._frontier
        found = list[tuple[float, int, int]]()
        for place, (node, total) in enumerate(zip(above, self._totals, strict=True)):
            for token_id, log_prob in self._known[node]:
                found.append((-(total + log_prob), place, token_id))
        if not found:
            return False
        level = list[int]()
        self._totals = []
        for rank, (cost, place, token_id) in enumerate(sorted(found)[: self._width]):
            child = self.child(above[place], token_id)
            if child is None:
                child = self.add(above[place], token_id)
                self.unsent.append(child)
            self.kinds[child] = NodeKind.DETERMINISTIC
            self.ranks[child] = rank
            self._totals.append(-cost)
            level.append(child)
        self._levels.append(level)
        return True

    # what is decided

    def check(self, base_len: int, decided: Sequence[BeamLevel], check_commit: CheckCommit) -> JobError | None:
        slot = self._slot
        known_len = self.length
        why = None
        if base_len > known_len:
            return JobError(JobFault.BEHIND, f"slot {slot.key[1]} knows {known_len} tokens", known_len)
        new = decided[known_len - base_len :]
        if base_len < slot.num_prompt or known_len + len(new) >= slot.max_len:
            limits = f"the slot holds {slot.num_prompt} to {slot.max_len}"
            why = f"base_len {base_len} and {len(decided)} levels, {limits}"
        elif not all(level.active for level in new):
            why = "a level has no beams that go on"
        elif new and max(parent for parent, _, _ in new[0].active) >= len(self.active):
            why = f"a level continues a beam that is not among {len(self.active)}"
        if why is None:
            return None
        return JobError(JobFault.INVALID, why)

    def continues(self, base_len: int, decided: Sequence[BeamLevel], *, is_new_lease: bool) -> bool:
        return True  # levels are the same under any lease

    def commit_decided(self, decided: Sequence[BeamLevel]) -> list[int]:
        for level in decided:
            ids = self.advance([level])
            self._sums = [total for _, _, total in level.active]
            self._slot.commit_from(len(self._slot.committed), ids)
            if not self._levels:
                continue
            if set(self.active) <= set(self._levels[0]):
                self._acceptance.note(0)
                self._levels = self._levels[1:]
            else:
                self._acceptance.note(None)
                self._levels = []
        self._choose_anew()
        return self.keep(range(len(self)))

    def _choose_anew(self) -> None:
        self._levels = []
        self._totals = self._sums
        self.kinds = {}
        self.ended = []
        self.is_end_known = False
        self.finish_step()
        self.unsent = [node for node in self.unsent if node in self.kinds]
        self.reroot(ROOT, set(self.drafts()) - set(self.kinds))

    def reroot(self, node: int, dropped: Container[int] = ()) -> dict[int, int]:
        kept = super().reroot(node, dropped)
        new_index = kept | {node: ROOT}
        levels = list[list[int]]()
        for level in self._levels:
            levels.append([new_index[old] for old in level if old in new_index])
        self._levels = levels
        self._known = remap(self._known, new_index)
        return kept

    def restart(self) -> None:
        self.forget_cache()
        self._known = {}
        self._choose_anew()
