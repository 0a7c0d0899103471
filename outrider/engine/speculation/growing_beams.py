"""What a draft grows under the live beams of a search: its own beams, level by level, guesses of the target's. Pure.

Sums begin with the target's own, which tell how the live beams stand to each other. Levels are chosen anew under every
level that the target decides; what was fed and is chosen again is not fed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from outrider.engine.speculation.beam import Level, draft_shape
from outrider.engine.speculation.beam_tree import BeamTree
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.tree import LEAST_CHANCE, Node
from outrider.wire.params import SamplingParams
from outrider.wire.speculation import Speculation


class GrowingBeams(BeamTree):
    """Of one slot. `unsent` are those of its drafts that are new, parents before their children; whoever sends them
    empties it, and `ended` with it.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        max_len: int,
        params: SamplingParams,
        speculation: Speculation,
        shares: SlotShares,
        stop_ids: Set[int],
    ) -> None:
        """max_len: most tokens that the slot may ever hold. stop_ids: those that no beam goes on with."""
        super().__init__(prompt_ids)
        assert params.beams is not None, "no beam search is asked for"
        self._width, self._depth = draft_shape(params.beams.width, speculation)
        self._is_fixed = speculation.is_fixed
        self._max_position = max_len - 2  # the target adds a level of its own to those that it accepts
        self._shares = shares
        self._stop_ids = frozenset(stop_ids)
        self._levels: list[list[tuple[Node, float]]] = []
        """Drafts by depth, best first, with their sums."""
        self.unsent: list[Node] = []
        self.ended: list[Node] = []
        """The best live beam's last token, once all is grown that the target may wait for."""
        self._is_told = False

    @property
    def committed_len(self) -> int:
        return self.num_settled

    @property
    def num_wanted(self) -> int:
        """Return how many likeliest tokens after a node it has to know."""
        return self._width + len(self._stop_ids)

    @property
    def has_guesses(self) -> bool:
        return bool(self._levels)

    @property
    def awaits_named(self) -> bool:
        """Return whether not all is grown yet that the target waits for."""
        return self._is_fixed and not self._is_grown

    @property
    def _is_grown(self) -> bool:
        return len(self._levels) >= self._depth or self._frontier[0][0].position >= self._max_position

    @property
    def _frontier(self) -> list[tuple[Node, float]]:
        return self._levels[-1] if self._levels else list(zip(self.live, self.sums, strict=True))

    def offers(self, most: int) -> list[tuple[float, Node]]:
        """Return up to `most` nodes that are worth feeding, each with its chance, parents first."""
        if self._is_grown:
            return []
        if not self.root.is_fed:
            return [(1.0, self.root)]
        nodes = [(1.0, node) for node in self.unfed()]
        chance = self._shares.share(0) ** len(self._levels)
        if not nodes and (self._is_fixed or chance >= LEAST_CHANCE):
            nodes = [(chance, node) for node, _ in self._frontier if not node.is_fed]
        return nodes[:most]

    def learn(self, node: Node, ids: Sequence[int], probs: Sequence[float]) -> None:
        """Note the likeliest tokens after a node that is fed, best first."""
        node.ranked = [(token_id, prob) for token_id, prob in zip(ids, probs, strict=True) if prob > 0.0]

    def grow(self) -> None:
        """Make the levels of which all is known."""
        while not self._is_grown and all(node.is_fed for node, _ in self._frontier):
            found = sorted(
                (
                    (-(total + math.log(prob)), place, token_id)
                    for place, (node, total) in enumerate(self._frontier)
                    for token_id, prob in node.ranked
                    if token_id not in self._stop_ids
                ),
            )
            level, above = list[tuple[Node, float]](), self._frontier
            for rank, (cost, place, token_id) in enumerate(found[: self._width]):
                parent = above[place][0]
                num_before = len(parent.children)
                node = self.child(parent, token_id)
                node.rank = rank
                level.append((node, -cost))
                if len(parent.children) > num_before:
                    self.unsent.append(node)
            if not level:
                break
            self._levels.append(level)
        if self._is_grown and not self._is_told:
            self._is_told = True
            self.ended.append(self.live[0])

    def go_on(self, levels: Sequence[Level]) -> tuple[list[int], list[int]]:
        """Go on under levels just decided. Return the ids that are settled now, and which of `fed` stay in the
        cache.
        """
        settled = list[int]()
        for level in levels:
            settled += self.advance([level])
            guessed = {id(node) for node, _ in self._levels[0]} if self._levels else set[int]()
            is_hit = all(id(node) in guessed for node in self.live)
            if self._levels:
                self._shares.note(0 if is_hit else None)
            self._levels = self._levels[1:] if is_hit else []
        self._choose_anew()
        below = [node for level in self._levels for node, _ in level]
        return settled, self.keep([*self.inner(), *self.live, *below])

    def _choose_anew(self) -> None:
        """Let only those drafts go on that are chosen by the sums as they are now."""
        unsent, self.unsent, self._levels, self._is_told, self.ended = self.unsent, [], [], False, []
        self.grow()
        chosen = {id(node) for level in self._levels for node, _ in level}
        for node in [*self.live, *(node for level in self._levels for node, _ in level)]:
            node.children = [child for child in node.children if id(child) in chosen]
        new = {id(node) for node in self.unsent}
        self.unsent = [*(node for node in unsent if id(node) in chosen and id(node) not in new), *self.unsent]

    def resend(self) -> None:
        """Let all that is known be sent again: what was sent may be lost. To a target that has it nothing changes."""
        self.unsent = [node for level in self._levels for node, _ in level]
        self._is_told, self.ended = False, []
        self.grow()

    def restart(self) -> None:
        """Grow anew from the live beams: what was fed is gone."""
        self.forget_cache()
        self._levels, self.unsent, self.ended, self._is_told = [], [], [], False
        for node in self.live:
            node.children = []
