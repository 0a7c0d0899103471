"""The draft's engine worker: grows a tree for every slot and pushes what it grows to the slot's target, without rounds.

A step feeds the likeliest nodes of all slots together, as many as make the most of the model's time, draws what follows
them, and sends it. A draft without a model asks its tables in place of the forward. Runs on the engine thread.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from draft_service.drawing import Fed, make_children, of_logits, uniforms
from draft_service.jobs import AdvanceJob
from draft_service.tables import TableSlot
from draft_service.tree import GrowingTree, Node, Plan
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.chain import law_of_counts
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.wire_tensors import encode_laws
from outrider.engine.speculation.nodes import MAX_NODES, PATH_END, NodeKind, Nodes
from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.engine.speculation.row_cost import RowCost, best_count
from outrider.engine.step_plan import Row
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, JobError, OpenJob, OwnerGone, SlotKey, TruncateJob
from outrider.engine.worker.scheduler import StepRequest, StepScheduler, Want
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import BareSlot, Slot, needs_prefill
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.transport.codec import DenseRows

FULL_LOGPROBS_BUDGET_BYTES = 4 << 20
"""`auto` sends whole laws while those of a round of all slots stay under this. Doubling it doubles the wire's share."""
LAWS_OF_A_ROUND = 8
"""Laws that a slot's round is taken to send, keys' followers counted. Doubling it cuts laws at half the slots."""
MOST_OFFERS = 16
"""Nodes that one slot has in a step at most. Doubling it gives a draft with few slots wider steps."""
PUSH_S = 0.004
"""Seconds between two messages of a slot whose target has guesses to go on with. Doubling it halves the messages, and
lets guesses come later."""
NUM_URGENT = 4
"""Messages of a slot that leave at once after its target had nothing to go on with. Doubling it lets a target that
waits go on with deeper guesses, for more messages."""

MOST_IN_MESSAGE = MAX_NODES // 2
"""Nodes with which a message is full; siblings of the last are added. Doubling it makes a target refuse the largest."""

Send = Callable[[str, int, Nodes], None]
"""Sends nodes to (the target's address, its epoch). Runs on the gRPC loop's thread."""


@dataclass(slots=True)
class Grown:
    """A slot, and the tree that grows there."""

    job: OpenJob
    slot: BareSlot
    shares: SlotShares
    ticket: int = 0
    tree: GrowingTree | None = None
    """None until it is told what is committed, and after a stop."""
    pushed_s: float = 0.0
    num_urgent: int = 0
    """Messages that leave at once: the target had nothing to go on with."""


class Grower:
    """Runs the draft's jobs and steps."""

    def __init__(
        self,
        runner: ModelRunner | None,
        keeper: SlotKeeper[BareSlot],
        engine: EngineThread,
        send: Send,
        metrics: WorkerMetrics,
        vocab_size: int,
        max_prefill_tokens: int = 0,
    ) -> None:
        """runner: None for a draft whose slots have tables."""
        self._runner = runner
        self._keeper = keeper
        self._engine = engine
        self._send = send
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._takes_trees = runner is None or runner.supports_trees
        self._slots: dict[SlotKey, Grown] = {}
        self._shares: dict[tuple[bool, bool], RankShares] = {}
        self._cost = RowCost()
        self._turns: StepScheduler | None = None
        if runner is not None:
            self._turns = StepScheduler(keeper.table, runner.pool, metrics, max_prefill_tokens)  # type: ignore[arg-type]

    # jobs

    def handle(self, job: object) -> None:
        match job:
            case AdvanceJob():
                self._advance(job)
            case OpenJob():
                self._open(job)
            case TruncateJob():
                self._truncate(job)
            case CloseJob():
                self._slots.pop((job.owner, job.slot_id), None)
                self._keeper.close(job)
            case OwnerGone():
                for key in [key for key in self._slots if key[0] == job.owner]:
                    del self._slots[key]
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def _open(self, job: OpenJob) -> None:
        slot = self._keeper.open(job)
        if slot is not None:
            kind = (job.params.greedy, job.params.determined)
            shares = SlotShares(self._shares.setdefault(kind, RankShares()))
            self._slots[slot.key] = Grown(job, slot, shares)

    def _truncate(self, job: TruncateJob) -> None:
        """Guesses under what is committed stay: the slot has been told of that by an Advance, or will be. A stop string
        ends the answer.
        """
        grown = self._slots.get((job.owner, job.slot_id))
        is_ahead = grown is not None and grown.tree is not None and job.reason != "stop"
        if grown is not None and grown.tree is not None and not is_ahead:
            grown.tree = None
            grown.slot.truncate(len(grown.slot.committed) + 1)
        self._keeper.truncate(job, keeps=is_ahead)

    def _advance(self, job: AdvanceJob) -> None:
        grown = self._slots.get((job.owner, job.slot_id))
        if grown is None:
            return  # closed meanwhile, or refused: the gateway knows, or is about to
        slot, new_len = grown.slot, job.base_len + len(job.committed_ids)
        tree = grown.tree if job.ticket == grown.ticket else None
        if tree is not None and new_len <= len(slot.committed):
            return  # late, or repeated
        wrong = self._keeper.check_commit(slot, job.base_len, job.committed_ids)
        if wrong is not None:
            self._tell(grown, wrong)
            return
        known = slot.committed[job.base_len :]
        if tree is None or known != list(job.committed_ids[: len(known)]):
            tree = self._begin(grown, job)
        else:
            is_here, known_len = self._is_here(slot, tree), len(slot.committed)
            slot.commit_from(job.base_len, job.committed_ids)
            self._re_root(slot, tree, slot.committed[known_len:], job.segment_floor, is_here)
        slot.asked_s = time.monotonic()
        grown.ticket, grown.tree = job.ticket, tree
        if not tree.root.children:
            grown.num_urgent = NUM_URGENT

    def _begin(self, grown: Grown, job: AdvanceJob) -> GrowingTree:
        """Return a tree that knows no guesses. Those of another are not for the cache to be compared by: its cells are
        in the order in which nodes were fed, and may have the ids of what is committed now and not its keys and values.
        """
        slot = grown.slot
        slot.truncate(len(slot.committed) + 1)
        slot.commit_from(job.base_len, job.committed_ids)
        slot.settle()
        plan = Plan(grown.job.speculation, slot.params, grown.shares, self._takes_trees, self._cut(grown))
        return GrowingTree(slot.committed, slot.max_len, slot.params, plan)

    def _re_root(self, slot: BareSlot, tree: GrowingTree, ids: Sequence[int], floor: int, is_here: bool) -> None:
        """Go on under the tokens committed; keep in the cache what is of use."""
        num_fed = len(tree.fed)
        keep = tree.advance(ids, floor)
        if not isinstance(slot, Slot) or self._runner is None:
            return
        if not is_here:
            slot.settle()
            tree.restart()
            return
        start = len(slot.cached) - num_fed
        if num_fed and keep != list(range(num_fed)):
            kept_ids = [slot.cached[start + place] for place in keep]
            self._runner.rebase(slot.table, start, keep)
            slot.rebased(start, kept_ids)
        else:
            slot.rebased(start, slot.cached[start:])

    def _is_here(self, slot: BareSlot, tree: GrowingTree) -> bool:
        """Return whether all that the tree fed is in the cache: memory may have been taken for others."""
        if not isinstance(slot, Slot) or not tree.root.is_fed:
            return True
        return len(slot.cached) == tree.committed_len + len(tree.fed)

    def _cut(self, grown: Grown) -> int | None:
        """Return to how many ids a slot's laws are cut, None for whole ones; `auto` goes by the budget."""
        speculation = grown.job.speculation
        if grown.slot.params.determined or speculation.draft_logprobs is DraftLogprobs.FULL:
            return None
        if speculation.draft_logprobs is DraftLogprobs.TOPK:
            return speculation.draft_topk
        num_slots = sum(1 for each in self._slots.values() if not each.slot.params.determined)
        num_bytes = 4 * self._vocab_size * LAWS_OF_A_ROUND * num_slots
        return None if num_bytes <= FULL_LOGPROBS_BUDGET_BYTES else speculation.draft_topk

    def _tell(self, grown: Grown, error: JobError) -> None:
        self._engine.answer(partial(grown.job.respond, error))

    # steps

    def next_wake(self) -> float | None:
        return None if self._turns is None else self._turns.next_wake(time.monotonic())

    def step(self, now: float) -> bool:
        """Feed the likeliest nodes of all slots, and pieces of prompts beside them."""
        chosen = self._choose()
        if self._runner is None or self._turns is None:
            fed = [self._asked(grown, node) for grown, nodes in chosen for node in nodes]
            self._draw([grown for grown, nodes in chosen for _ in nodes], fed)
            worked = bool(fed)
        else:
            worked = self._run(self._runner, self._turns, chosen, now)
        if worked:
            seconds = time.monotonic() - now
            self._metrics.busy_seconds.inc(seconds)
            self._keeper.refresh_gauges()
        self._push_due(chosen)
        return worked

    def fail_step(self, error: Exception) -> None:
        """Give up every slot that grows: what is in its cache cannot be trusted, and the gateway opens it again."""
        for key, grown in [(key, grown) for key, grown in self._slots.items() if grown.tree is not None]:
            self._give_up(key, grown, f"the draft's step failed: {error}")

    def _give_up(self, key: SlotKey, grown: Grown, why: str) -> None:
        self._tell(grown, JobError(Fault.INTERNAL, why))
        grown.slot.distrust()
        del self._slots[key]
        self._keeper.close(CloseJob(*key))

    def _choose(self) -> list[tuple[Grown, list[Node]]]:
        """Return what is fed next: nodes of several slots, the likeliest first."""
        offers: list[list[tuple[float, int, Node, Grown]]] = []
        for index, grown in enumerate(self._slots.values()):
            tree, slot = grown.tree, grown.slot
            if tree is None or (isinstance(slot, Slot) and needs_prefill(slot)):
                continue
            if not self._is_here(slot, tree):
                tree.restart()
            found = tree.offers(MOST_OFFERS if self._takes_trees else 1)
            offers.append([(-chance, index, node, grown) for chance, node in found])
        best = list(heapq.merge(*offers, key=lambda offer: offer[:2]))
        count = best_count([-chance for chance, *_ in best], 0.0, 0, self._cost)
        chosen: dict[int, tuple[Grown, list[Node]]] = {}
        for _, index, node, grown in best[: max(count, 1)]:
            chosen.setdefault(index, (grown, []))[1].append(node)
        return list(chosen.values())

    def _run(
        self, runner: ModelRunner, turns: StepScheduler, chosen: list[tuple[Grown, list[Node]]], now: float
    ) -> bool:
        nodes_of = {grown.slot.key: (grown, nodes) for grown, nodes in chosen}
        requests: dict[SlotKey, StepRequest] = {}
        for key, grown in self._slots.items():
            slot = grown.slot
            assert isinstance(slot, Slot), "a model's slot has a cache"
            if key in nodes_of:
                num_after = max(len(slot.cached), len(slot.committed)) + len(nodes_of[key][1])
                requests[key] = StepRequest(Want.STEP, num_after)
            elif grown.tree is not None and needs_prefill(slot):
                requests[key] = StepRequest(Want.PREFILL, len(slot.committed))
        if not requests and not turns.num_starved:
            return False
        turn = turns.take(requests, now, feed_all=False)
        running = [nodes_of[key] for key in turn.running]
        rows = [_row(grown, nodes) for grown, nodes in running]
        if not rows and not turn.pieces:
            return turn.worked
        logits = runner.forward([*rows, *(piece.row for piece in turn.pieces)])  # [R, V] float32
        num_rows = sum(row.num_new for row in rows)
        if rows:
            host, fed, owners = HostLogits(logits), list[Fed](), list[Grown]()
            for (grown, nodes), row in zip(running, rows, strict=True):
                assert isinstance(grown.slot, Slot) and grown.tree is not None
                grown.slot.fed(row.new_ids)
                state = self._keeper.sampling_state(grown.slot)
                for node in nodes:
                    grown.tree.feed(node)
                    fed.append(of_logits(grown.tree, node, state, host, len(fed)))
                    owners.append(grown)
            self._draw(owners, fed)
        else:
            runner.forward_s()  # nothing else waits for pieces of prompts
        seconds = time.monotonic() - now
        turns.done(turn, num_rows, seconds)
        if rows and not turn.pieces:
            self._cost.note(num_rows, seconds)
        self._metrics.batch_size.observe(len(rows) + len(turn.pieces))
        return True

    def _asked(self, grown: Grown, node: Node) -> Fed:
        """Ask a slot's table what follows a node."""
        slot, tree = grown.slot, grown.tree
        assert isinstance(slot, TableSlot) and tree is not None
        path = node.path(tree.root)
        tree.feed(node)

        def law(row: LogitRow) -> RowLaw | None:
            counts = slot.ask(path)
            return None if counts is None else law_of_counts(counts, row, self._vocab_size)

        return Fed(tree, node, self._keeper.sampling_state(slot), law)

    def _draw(self, owners: Sequence[Grown], fed: Sequence[Fed]) -> None:
        """Make what follows the nodes that were fed. NaN in one slot's logits ends that slot alone."""
        failed: dict[SlotKey, tuple[Grown, str]] = {}
        for grown, each, numbers in zip(owners, fed, uniforms(fed), strict=True):
            if grown.slot.key in failed:
                continue
            try:
                make_children(each, numbers)
            except NonFiniteLogits as error:
                failed[grown.slot.key] = (grown, error.message)
                continue
            each.tree.ended.extend(_ends(each))
            self._metrics.steps.labels(kind="grow").inc()
        for key, (grown, why) in failed.items():
            self._give_up(key, grown, why)

    # what leaves

    def _push_due(self, chosen: Sequence[tuple[Grown, list[Node]]]) -> None:
        """Send what was grown: at once what the target waits for and what is last, the rest now and then."""
        now = time.monotonic()
        growing = {id(grown) for grown, _ in chosen}
        for grown in self._slots.values():
            tree = grown.tree
            if tree is None or not (tree.unsent or tree.ended):
                continue
            is_due = now - grown.pushed_s >= PUSH_S
            if tree.awaits_named:  # the target waits for all of it: nothing goes out early but large laws
                is_due = is_due and not grown.slot.params.determined
            else:
                is_due = is_due or grown.num_urgent > 0 or id(grown) not in growing or not tree.offers(1)
            if is_due:
                self._push(grown, tree)
                grown.pushed_s, grown.num_urgent = now, max(0, grown.num_urgent - 1)

    def _push(self, grown: Grown, tree: GrowingTree) -> None:
        unsent, tree.unsent = tree.unsent, []
        ended, tree.ended = tree.ended, []
        groups: list[list[Node]] = []
        group_of: dict[int, list[Node]] = {}
        for node in unsent:  # a parent is made before its children
            group = group_of.get(id(node.parent))
            if group is None or (len(group) >= MOST_IN_MESSAGE and node.rank == 0):
                group = []
                groups.append(group)
            group.append(node)
            group_of[id(node)] = group_of[id(node.parent)] = group  # siblings stay together: they share a law
        address, epoch = grown.job.deliver_to, grown.job.target_epoch
        for group in groups:
            self._engine.answer(partial(self._deliver, address, epoch, *_nodes(grown, tree, group)))
        for node in ended:
            nodes = Nodes(grown.ticket, tree.committed_len, node.path(tree.root), (), (), (), (), (), None, ends=True)
            self._engine.answer(partial(self._send, address, epoch, nodes))

    def _deliver(self, address: str, epoch: int, nodes: Nodes, laws: Sequence[RowLaw], is_cut: bool) -> None:
        """Encode and send. On the gRPC loop's thread."""
        encoding, num_bytes = "ids", 4 * len(nodes.ids)
        if laws:
            rows = encode_laws(laws, prefer_sparse=is_cut)
            is_full = isinstance(rows, DenseRows)
            encoding = "full" if is_full else "topk"
            num_bytes += len(rows.data) if isinstance(rows, DenseRows) else len(rows.ids) + len(rows.log_probs)
            nodes = nodes.with_rows(rows)
        self._metrics.wire_bytes.labels(encoding=encoding).inc(num_bytes)
        self._send(address, epoch, nodes)


def _ends(fed: Fed) -> Sequence[Node]:
    """Return the nodes that the target is not to wait for more after, now that a node's children are made."""
    if not fed.node.children:
        return [fed.node]
    first = fed.node.children[0]
    if fed.node.kind is NodeKind.GUESS and first.kind is NodeKind.LAW:  # what is guessed and what is drawn do not mix
        return [fed.node]
    return [first] if fed.tree.is_end(first) else []


def _row(grown: Grown, nodes: Sequence[Node]) -> Row:
    """Return a slot's share of the next forward: the committed tokens that are not cached, or nodes of its tree."""
    slot, tree = grown.slot, grown.tree
    assert isinstance(slot, Slot) and tree is not None
    num_cached = len(slot.cached)
    if not tree.root.is_fed:
        return Row(slot.table, slot.committed[num_cached:], num_cached, 1, slot.cached)
    place = {id(node): index for index, node in enumerate([*tree.fed, *nodes])} | {id(tree.root): PATH_END}
    parents = [place[id(node.parent)] for node in (*tree.fed, *nodes)]
    is_chain = parents == list(range(-1, len(parents) - 1))
    new_ids = [node.token_id for node in nodes]
    return Row(slot.table, new_ids, num_cached, len(nodes), slot.cached, None if is_chain else parents)


def _nodes(grown: Grown, tree: GrowingTree, group: Sequence[Node]) -> tuple[Nodes, list[RowLaw], bool]:
    """Return nodes that hang together, the laws of those that were drawn, and whether these were cut."""
    index = {id(node): place for place, node in enumerate(group)}
    first = group[0].parent
    assert first is not None, "the root is not sent"
    drawn = [node for node in group if node.kind is NodeKind.LAW]
    laws = [next(same).law for _, same in groupby(drawn, key=lambda node: id(node.parent))]
    nodes = Nodes(
        grown.ticket,
        tree.committed_len,
        first.path(tree.root),
        [node.token_id for node in group],
        [index.get(id(node.parent), PATH_END) for node in group],
        [node.rank for node in group],
        [node.kind for node in group],
        [0 if node.segment is None or node.kind is not NodeKind.LAW else node.segment.start for node in group],
        None,
    )
    is_cut = bool(drawn) and drawn[0].segment is not None and drawn[0].segment.topk is not None
    return nodes, [law for law in laws if law is not None], is_cut
