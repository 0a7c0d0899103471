"""A draft that is a model: feeds the nodes that it is asked for, and pieces of prompts beside them, in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from draft_service.feeding import Feeder, cached
from draft_service.growing import Growing
from draft_service.translated_slot import TranslatedSlot
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.speculation.drafter import Said, of_logits
from outrider.engine.speculation.nodes import TREE_ROOT
from outrider.engine.speculation.tree import GrowingTree, Node
from outrider.engine.step_plan import Row
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill


class ModelDrafter:
    """A slot's cache holds its committed tokens and then the nodes of its tree that were fed, in that order."""

    most_depth: int | None = None

    def __init__(self, feeder: Feeder, keeper: SlotKeeper[Slot]) -> None:
        self.takes_trees = self.takes_beams = feeder.runner.supports_trees
        self._feeder = feeder
        self._runner = feeder.runner
        self._keeper = keeper

    def say(self, wanted: Sequence[tuple[Growing, Sequence[Node]]], now: float) -> Sequence[Said] | None:
        nodes_of = {growing.slot.key: (growing, nodes, _behind(growing, nodes)) for growing, nodes in wanted}
        num_new = {key: 1 if _writes(growing) else len(nodes) for key, (growing, nodes, _) in nodes_of.items()}
        num_guesses = {key: len(guesses) for key, (_, _, guesses) in nodes_of.items() if guesses}
        fed = self._feeder.feed(num_new, lambda key: self._row(*nodes_of[key]), now, num_guesses)
        if fed is None:
            return None
        said, host, index = list[Said](), HostLogits(fed.logits) if fed.rows else None, 0
        for key, row in fed.rows:
            growing, nodes, guesses = nodes_of[key]
            slot, tree = cached(growing), growing.tree
            assert tree is not None and host is not None, "no tree grows here"
            state = self._keeper.sampling_state(slot)
            if isinstance(slot, TranslatedSlot) and slot.writes:
                slot.note_written(row.new_ids, host.raw_best_id(index))
                said += _read(slot, tree, nodes, state)
            else:
                self._note_fed(slot, tree, row, index, len(nodes))
                own = host if slot.translation is None else host.told(slot.translation.logits)
                for place, node in enumerate(nodes):
                    tree.feed(node)
                    said.append(of_logits(tree, node, state, own, index + place))
                if growing.cascade is not None:
                    first, num_fed = index + len(nodes), row.num_logits - len(nodes)
                    ahead = enumerate(guesses[:num_fed], first)
                    growing.cascade.note_fed([of_logits(tree, guess, state, own, place) for place, guess in ahead])
            index += row.num_logits
        return said

    def _row(self, growing: Growing, nodes: Sequence[Node], guesses: Sequence[Node]) -> Row:
        """Return a slot's share of the next forward: the committed tokens that are not cached, or nodes of its tree;
        and guesses of what is drawn behind them.
        """
        slot, tree = cached(growing), growing.tree
        assert tree is not None, "no tree grows here"
        if isinstance(slot, TranslatedSlot) and slot.writes:
            new_ids = slot.next_written()
            return Row(slot.table, new_ids, len(slot.cached), 1, slot.cached)
        num_cached = len(slot.cached)
        if not tree.root.is_fed:
            ids = slot.uncached()
            features = slot.features_of(len(ids))
            ids = [*ids, *(guess.token_id for guess in guesses)]
            num_logits = 1 + len(guesses)
            return Row(slot.table, ids, num_cached, num_logits, slot.cached, features=features, source=slot.source)
        nodes = [*nodes, *guesses]
        order = [*tree.fed, *nodes]
        place = {id(node): index for index, node in enumerate(order)} | {id(tree.root): TREE_ROOT}
        parents = [place[id(node.parent)] for node in order]
        is_chain = parents == list(range(-1, len(parents) - 1))
        new_ids, features = [node.token_id for node in nodes], self._features_of(slot, parents[len(tree.fed) :])
        if slot.translation is not None:
            new_ids = [slot.translation.draft_id(token_id) for token_id in new_ids]
        rest = (None if is_chain else parents, features, slot.source)
        return Row(slot.table, new_ids, num_cached, len(nodes), slot.cached, *rest)

    def _features_of(self, slot: Slot, parents: Sequence[int]) -> Tensor | None:
        """Return what goes into a forward beside nodes that follow these fed ones, by index."""
        return None

    def _note_fed(self, slot: Slot, tree: GrowingTree, row: Row, index: int, num_nodes: int) -> None:
        """Note that a slot's row went through. index: that of the logits after the first of its nodes."""
        slot.fed(row.new_ids)

    def keep_fed(self, asked: Growing, num_fed: int, keep: Sequence[int]) -> None:
        slot, tree = cached(asked), asked.tree
        if tree is not None and _writes(asked):  # it is all written anew, behind what of it was committed
            slot.settle()
            tree.restart()
            return
        start = len(slot.cached) - num_fed
        if num_fed and len(keep) < num_fed:
            kept_ids = [slot.cached[start + place] for place in keep]
            self._runner.rebase(slot.table, start, keep)
            slot.rebased(start, kept_ids)
        else:
            slot.rebased(start, slot.cached[start:])
        if isinstance(slot, TranslatedSlot) and tree is not None:
            goes_on = tree.root.is_fed and slot.is_told(len(slot.cached) - len(tree.fed))
            if not goes_on:  # what was drawn token by token is told otherwise, and so is what follows it
                slot.settle()
                tree.restart()

    def knows(self, asked: Growing) -> bool:
        """Memory may have been taken for others."""
        slot, tree = cached(asked), asked.tree
        if _writes(asked):
            return True
        num_cached = slot.first + len(slot.cached)
        return tree is None or not tree.root.is_fed or num_cached == len(slot.ids) + len(tree.fed)

    def is_ready(self, asked: Growing) -> bool:
        return not needs_prefill(cached(asked))

    def next_wake(self) -> float | None:
        return self._feeder.next_wake()


def _behind(asked: Growing, nodes: Sequence[Node]) -> Sequence[Node]:
    return () if asked.cascade is None else asked.cascade.behind(nodes)


def _writes(asked: Growing) -> bool:
    slot = asked.slot
    return isinstance(slot, TranslatedSlot) and slot.writes


def _read(slot: TranslatedSlot, tree: GrowingTree, nodes: Sequence[Node], state: SamplingState) -> Iterator[Said]:
    """Yield what follows these nodes, as far as it is known, in the text that the draft has written. The others are
    asked for again.
    """
    for node in nodes:
        ids = slot.guesses[tree.depth(node) :][:1]
        if ids or slot.has_ended:
            tree.feed(node)
            yield Said(tree, node, state, _nothing, partial(_certain, ids))


def _nothing(row: LogitRow) -> None:
    return None


def _certain(ids: Sequence[int], row: LogitRow, num: int) -> tuple[Sequence[int], Sequence[float]]:
    return ids, [1.0] * len(ids)
