"""From what is parked, or what the slot's own drafter says, to what a step verifies; and what its outcome teaches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from outrider.engine.sampling.row_law import RowLaw, one_hot
from outrider.engine.sampling.tree_acceptance import DraftTree
from outrider.engine.sampling.wire_tensors import decode_law
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import Drafter, TokenKind
from outrider.wire.log import about, get_logger
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.transport.codec import BadTensor
from target_service.decide_on_device import Decided
from target_service.jobs import Fallback
from target_service.lease import Candidates, Lease, Ready
from target_service.own_drafts import OwnDrafts
from target_service.parked import ParkedNode

log = get_logger(__name__)


class Drafts:
    """Chooses among what there is for a slot."""

    def __init__(
        self,
        own: OwnDrafts,
        keeper: SlotKeeper[Slot],
        metrics: WorkerMetrics,
        vocab_size: int,
        takes_trees: bool,
    ) -> None:
        self._own = own
        self._keeper = keeper
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._takes_trees = takes_trees

    def candidates(self, lease: Lease) -> Candidates:
        """Return what the slot's next step might verify: its own drafter's chain where that has something to say, else
        what is parked.
        """
        room = lease.room
        if not room:
            return Candidates(lease, ())
        num_fixed = lease.speculation.num_draft_tokens
        key, is_alone = lease.slot.key, not lease.job.is_drafted
        if self._own.has_next(key) or (num_fixed and is_alone and self._own.follows(key)):
            most = min(room, num_fixed or room)
            own = self._own.draw(lease.slot, self._keeper.sampling_state(lease.slot), most)
            if own.ids:
                gains = list(accumulate([lease.own_shares.share(0)] * len(own.ids), mul))
                return Candidates(lease, gains, own, must=len(own.ids) if num_fixed else 0)
        if lease.speculation.tree is not None:
            nodes = self._of_shape(lease, room)
            return Candidates(lease, [chance for chance, _, _ in nodes], nodes=nodes, must=len(nodes))
        if self._takes_trees and lease.slot.params.determined and not num_fixed and lease.slot.params.lenience == 1.0:
            nodes = lease.parked.best(lease.shares.share, room)
        else:
            nodes = _as_chain(lease.parked.chain(min(room, num_fixed or room)), lease.shares.share(0))
        return Candidates(lease, [chance for chance, _, _ in nodes], nodes=nodes, must=len(nodes) if num_fixed else 0)

    def lacking(self, found: Candidates) -> float | None:
        """Return the chance that the next guess would be kept, where more may come than is here; None where not, or
        where all that was named is here.
        """
        lease, num_here = found.lease, len(found.gains)
        if not lease.live or found.own is not None or num_here >= lease.room or lease.parked.ended:
            return None
        if not lease.speculation.is_fixed:
            return lease.shares.share(0) ** (len(lease.parked.chain(lease.room)) + 1)
        tree = lease.speculation.tree
        wanted = lease.speculation.num_draft_tokens if tree is None else tree.most_nodes
        return 1.0 if num_here < min(wanted, lease.room) else None

    def ready(self, found: Candidates, count: int) -> Ready:
        """Return the slot as it goes into the step, with so many of its candidates."""
        lease, slot = found.lease, found.lease.slot
        refused = Fallback.REFUSED if lease.refused is not None else None
        if not count:
            late = lease.held_s > 0.0 and lease.speculation.is_fixed and not lease.parked.ended
            return Ready(slot, [], None, fallback=refused or (Fallback.LATE if late else None))
        if found.own is not None:
            laws = found.own.laws
            return Ready(
                slot,
                found.own.ids[:count],
                None if laws is None else laws[:count],
                guessed=found.own.is_guessed and slot.params.lenience == 1.0,
                drafter=self._own.kind(slot.key),
            )
        try:
            return self._of_nodes(slot, found.nodes[:count])
        except BadTensor as error:
            log.warning("refused drafts of slot %d: %s", slot.key[1], error, extra=about(slot=slot.key[1]))
            self._metrics.proposals_refused.inc()
            self._count("refused", lease.parked.clear())
            return Ready(slot, [], None, fallback=Fallback.REFUSED)

    def committed(
        self, lease: Lease, r: Ready, decided: Decided, ids: Sequence[int], last: TokenKind, now: float
    ) -> int:
        """Learn from what was committed, and go on under it; return how many drafts had come too late since the last
        verdict.
        """
        determined = lease.slot.params.determined
        if r.drafter is Drafter.MODEL:
            self._count("verified", len(r.draft_ids))
        if r.drafter is not None and (not determined or r.drafter is not Drafter.MODEL):
            shares = lease.shares if r.drafter is Drafter.MODEL else lease.own_shares
            for _ in range(decided.num_accepted):
                shares.note(0)
            if decided.num_accepted < len(r.draft_ids):
                shares.note(None)
        for shares, is_tried in ((lease.shares, r.drafter is Drafter.MODEL), (lease.own_shares, r.drafter is not None)):
            if not is_tried:
                shares.forget()
        recovered = last is TokenKind.RECOVERED
        given_up = lease.parked.advance(ids, recovered, lease.shares.note if determined else None)
        if recovered:
            lease.parked.recovered_at(len(lease.slot.committed))
        self._count("pruned", given_up)
        num_wasted, lease.num_wasted = lease.num_wasted, 0
        lease.ready_s, lease.held_s, lease.refused = now, 0.0, None
        lease.hit = bool(lease.parked.chain(1))
        lease.lacks = not lease.hit
        return num_wasted

    def _of_shape(self, lease: Lease, room: int) -> list[tuple[float, ParkedNode, int]]:
        """Return what has come of the tree that the request names."""
        shape = lease.speculation.tree
        assert shape is not None, "the request names no tree"
        fitted = shape.fitted(lease.slot.max_len - len(lease.slot.committed) - 1, room)
        if fitted is None or not self._takes_trees:
            return _as_chain(lease.parked.chain(min(room, shape.depth)), lease.shares.share(0))
        kind = NodeKind.GUESS if lease.slot.params.determined else NodeKind.LAW
        return lease.parked.within(lease.shares.share, kind, fitted)

    def _of_nodes(self, slot: Slot, nodes: Sequence[tuple[float, ParkedNode, int]]) -> Ready:
        """Raises BadTensor."""
        ids, parents = [node.token_id for _, node, _ in nodes], [parent for _, _, parent in nodes]
        is_chain = parents == list(range(-1, len(nodes) - 1))
        if slot.params.determined:
            tree = None if is_chain else DraftTree(tuple(ids), tuple(parents))
            return Ready(slot, ids, None, tree, drafter=Drafter.MODEL)
        if nodes[0][1].kind is NodeKind.GUESS:
            laws = [one_hot(token_id, self._vocab_size) for token_id in ids]
            exact = slot.params.lenience == 1.0
            return Ready(slot, ids, laws, guessed=exact, drafter=Drafter.MODEL)
        tree = None if is_chain else DraftTree.checked(ids, parents)
        laws = self._laws(slot, nodes, tree)
        return Ready(slot, ids, laws, tree, drafter=Drafter.MODEL)

    def _laws(self, slot: Slot, nodes: Sequence[tuple[float, ParkedNode, int]], tree: DraftTree | None) -> list[RowLaw]:
        """Return what the children of each inner node were drawn from, in the order of `DraftTree.inner`."""
        inner = list(range(-1, len(nodes) - 1)) if tree is None else tree.inner
        laws = list[RowLaw]()
        for parent in inner:
            children = [node for _, node, at in nodes if at == parent]
            if children[0].kind is NodeKind.GUESS:  # a drafter without a choice among others with one
                laws.append(one_hot(children[0].token_id, self._vocab_size))
                continue
            drawn_from = children[0].law
            if drawn_from is None:
                raise BadTensor("distributions are missing, and acceptance is by rejection at a temperature above 0")
            laws.append(decode_law(*drawn_from, self._vocab_size, [child.token_id for child in children]))
        return laws

    def _count(self, fate: str, num: int) -> None:
        if num:
            self._metrics.parked_tokens.labels(fate=fate).inc(num)


def _as_chain(nodes: Sequence[ParkedNode], share: float) -> list[tuple[float, ParkedNode, int]]:
    chances = accumulate([share] * len(nodes), mul)
    return [(chance, node, index - 1) for index, (chance, node) in enumerate(zip(chances, nodes, strict=True))]
