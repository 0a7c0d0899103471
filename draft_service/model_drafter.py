"""A draft that is a model: feeds the nodes that it is asked for, and pieces of prompts beside them, in one forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from draft_service.growing import Growing
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.speculation.drafter import Said, of_logits
from outrider.engine.speculation.nodes import TREE_ROOT
from outrider.engine.speculation.tree import Node
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.scheduler import StepRequest, StepScheduler, Want
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.wire.metrics import WorkerMetrics


class ModelDrafter:
    """A slot's cache holds its committed tokens and then the nodes of its tree that were fed, in that order."""

    def __init__(
        self,
        runner: ModelRunner,
        keeper: SlotKeeper[Slot],
        metrics: WorkerMetrics,
        max_prefill_tokens: int,
        growing: Mapping[SlotKey, Growing],
        flush: Callable[[], None],
    ) -> None:
        """growing: all slots of the worker, those whose prompt has to be read among them. flush: lets what is to be
        sent leave; called when the model is about to work.
        """
        self.takes_trees = runner.supports_trees
        self._runner = runner
        self._keeper = keeper
        self._metrics = metrics
        self._growing = growing
        self._flush = flush
        self._turns = StepScheduler(keeper.table, runner.pool, metrics, max_prefill_tokens)

    def say(self, wanted: Sequence[tuple[Growing, Sequence[Node]]], now: float) -> Sequence[Said] | None:
        nodes_of = {growing.slot.key: (growing, nodes) for growing, nodes in wanted}
        requests = self._requests(nodes_of)
        if not requests and not self._turns.num_starved:
            return None
        turn = self._turns.take(requests, now, feed_all=False)
        running = [nodes_of[key] for key in turn.running]
        rows = [_row(growing, nodes) for growing, nodes in running]
        if not rows and not turn.pieces:
            return () if turn.worked else None
        self._flush()
        logits = self._runner.forward([*rows, *(piece.row for piece in turn.pieces)])  # [R, V] float32
        said = list[Said]()
        if rows:
            host = HostLogits(logits)
            for (growing, nodes), row in zip(running, rows, strict=True):
                slot, tree = _cached(growing), growing.tree
                assert tree is not None, "no tree grows here"
                slot.fed(row.new_ids)
                state = self._keeper.sampling_state(slot)
                for node in nodes:
                    tree.feed(node)
                    said.append(of_logits(tree, node, state, host, len(said)))
        else:
            self._runner.forward_s()  # nothing else waits for pieces of prompts
        self._turns.done(turn, sum(row.num_new for row in rows), time.monotonic() - now)
        self._metrics.batch_size.observe(len(rows) + len(turn.pieces))
        return said

    def re_root(self, asked: Growing, num_fed: int, keep: Sequence[int]) -> None:
        slot = _cached(asked)
        start = len(slot.cached) - num_fed
        if num_fed and len(keep) < num_fed:
            kept_ids = [slot.cached[start + place] for place in keep]
            self._runner.rebase(slot.table, start, keep)
            slot.rebased(start, kept_ids)
        else:
            slot.rebased(start, slot.cached[start:])

    def knows(self, asked: Growing) -> bool:
        """Memory may have been taken for others."""
        slot, tree = _cached(asked), asked.tree
        return tree is None or not tree.root.is_fed or len(slot.cached) == tree.committed_len + len(tree.fed)

    def next_wake(self) -> float | None:
        return self._turns.next_wake(time.monotonic())

    def _requests(self, nodes_of: Mapping[SlotKey, tuple[Growing, Sequence[Node]]]) -> dict[SlotKey, StepRequest]:
        requests: dict[SlotKey, StepRequest] = {}
        for key, growing in self._growing.items():
            slot = _cached(growing)
            if key in nodes_of:
                num_after = max(len(slot.cached), len(slot.committed)) + len(nodes_of[key][1])
                requests[key] = StepRequest(Want.STEP, num_after)
            elif growing.tree is not None and needs_prefill(slot):
                requests[key] = StepRequest(Want.PREFILL, len(slot.committed))
        return requests


def _cached(growing: Growing) -> Slot:
    assert isinstance(growing.slot, Slot), "a model's slot has a cache"
    return growing.slot


def _row(growing: Growing, nodes: Sequence[Node]) -> Row:
    """Return a slot's share of the next forward: the committed tokens that are not cached, or nodes of its tree."""
    slot, tree = _cached(growing), growing.tree
    assert tree is not None, "no tree grows here"
    num_cached = len(slot.cached)
    if not tree.root.is_fed:
        return Row(slot.table, slot.committed[num_cached:], num_cached, 1, slot.cached)
    order = [*tree.fed, *nodes]
    place = {id(node): index for index, node in enumerate(order)} | {id(tree.root): TREE_ROOT}
    parents = [place[id(node.parent)] for node in order]
    is_chain = parents == list(range(-1, len(parents) - 1))
    new_ids = [node.token_id for node in nodes]
    return Row(slot.table, new_ids, num_cached, len(nodes), slot.cached, None if is_chain else parents)
