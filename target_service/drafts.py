"""From what is parked, or what the slot's own drafter says, to what a step verifies; and what its outcome teaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.engine.sampling.row_law import RowLaw, one_hot
from outrider.engine.sampling.tree_acceptance import DraftTree
from outrider.engine.sampling.wire_tensors import decode_law
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import Drafter
from outrider.wire.log import about, get_logger
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.transport.codec import BadTensor
from target_service.beams import Beams, Fed
from target_service.chains import as_chain
from target_service.decide import all_kept
from target_service.decide_on_device import Decided
from target_service.jobs import Fallback
from target_service.lease import Candidate, Candidates, Lease, Ready
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
        """Return what the slot's next step might verify: what its grammar leaves no choice of, where that is more than
        all else, its own drafter's chain where that has something to say, else what is parked. Which of them goes by
        how much of each there is, and by the tokens committed.

        A slot that names how much is verified waits for that, unless what is forced is as much.
        """
        if lease.beams is not None:
            if lease.beams.is_behind(lease.slot):
                return Candidates(lease)
            most = lease.slot.most_cached - len(lease.slot.cached) - lease.num_undrafted
            nodes = lease.beams.candidates(lease.shares)[: max(0, most)]
            return Candidates(lease, nodes, len(nodes) if lease.speculation.is_fixed else 0)
        found = self._drafted(lease)
        forced = self.or_forced(found)
        return found if lease.speculation.is_fixed and len(forced.nodes) < _wanted(lease) else forced

    def or_forced(self, found: Candidates) -> Candidates:
        """Return what the grammar leaves no choice of in place of what was found, where that is more: guesses, and
        verified like any.
        """
        lease = found.lease
        if not lease.slot.params.grammar:
            return found
        room = min(lease.room, lease.speculation.num_draft_tokens or lease.room)
        forced = [ParkedNode(token_id) for token_id in self._keeper.sampling_state(lease.slot).forced()[:room]]
        if len(forced) <= len(found.nodes):
            return found
        return Candidates(lease, as_chain(forced, 1.0), len(forced) if lease.speculation.is_fixed else 0, None)

    def with_scaffold(self, found: Candidates) -> Candidates:
        """Return the same with what the slot's own drafter might have fed beside it, of which later steps have drafts;
        without where there will be none, or no memory.
        """
        slot = found.lease.slot
        scaffold = self._own.scaffold(slot, [parent for _, _, parent in found.nodes]) if found.lease.room else None
        if scaffold is None or len(slot.committed) + len(found.nodes) + len(scaffold.ids) > slot.most_cached:
            return found
        return replace(found, scaffold=scaffold)

    def _drafted(self, lease: Lease) -> Candidates:
        room = lease.room
        if not room:
            return Candidates(lease)
        num_fixed = lease.speculation.num_draft_tokens
        insists = bool(num_fixed and not lease.job.is_drafted)
        for kind in self._own.asked(lease.slot, insists=insists):  # what a grammar masks grows nothing
            state, shares = self._keeper.sampling_state(lease.slot), lease.own_shares[kind]
            own = self._own.candidates(lease.slot, kind, state, shares, min(room, num_fixed or room))
            if own:
                return Candidates(lease, own, len(own) if num_fixed else 0, kind)
        if lease.speculation.tree is not None:
            nodes = self._of_shape(lease, room)
            return Candidates(lease, nodes, len(nodes))
        if self._takes_trees and lease.slot.params.determined and not num_fixed and lease.slot.params.lenience == 1.0:
            return Candidates(lease, lease.parked.best(lease.shares.share, room))
        nodes = as_chain(lease.parked.chain(min(room, num_fixed or room)), lease.shares.share(0))
        return Candidates(lease, nodes, len(nodes) if num_fixed else 0)

    def lacking(self, found: Candidates) -> float | None:
        """Return the chance that the next guess would be kept, where more may come than is here; None where not, or
        where all that was named is here.
        """
        lease, num_here = found.lease, len(found.nodes)
        if lease.beams is not None:
            return self._lacking_beams(lease, lease.beams)
        if not lease.live or found.drafter is not Drafter.MODEL or num_here >= lease.room or lease.parked.ended:
            return None
        if lease.wanting is not None and len(lease.slot.cached) < len(lease.slot.committed) - 1:
            return None  # its draft reads rows of what is fed in this step
        if not lease.speculation.is_fixed:
            return lease.shares.share(0) ** (len(lease.parked.chain(lease.room)) + 1)
        return 1.0 if num_here < _wanted(lease) else None

    def _lacking_beams(self, lease: Lease, beams: Beams) -> float | None:
        if not lease.live or beams.num_here >= beams.depth or beams.ended or beams.is_behind(lease.slot):
            return None
        return 1.0 if lease.speculation.is_fixed else lease.shares.share(0) ** (beams.num_here + 1)

    def ready(self, found: Candidates, count: int, with_scaffold: bool = False) -> Ready:
        """Return the slot as it goes into the step, with so many of its candidates, and the scaffold of those."""
        ready = self._with_candidates(found, count)
        if not with_scaffold or found.scaffold is None:
            return ready
        return replace(ready, scaffold=found.scaffold.beside(len(ready.draft_ids)))

    def _with_candidates(self, found: Candidates, count: int) -> Ready:
        lease, slot = found.lease, found.lease.slot
        if not count:
            return Ready(slot, [], None, fallback=self.fallback(lease))
        try:
            return self._of_nodes(slot, found.nodes[:count], found.drafter)
        except BadTensor as error:
            log.warning("refused drafts of slot %d: %s", slot.key[1], error, extra=about(slot=slot.key[1]))
            self._metrics.proposals_refused.inc()
            self._metrics.note_parked("refused", lease.parked.clear())
            return Ready(slot, [], None, fallback=Fallback.REFUSED)

    def fallback(self, lease: Lease) -> Fallback | None:
        """Return why a step has no drafts, where it was to have some."""
        if lease.refused is not None:
            return Fallback.REFUSED
        ended = lease.parked.ended if lease.beams is None else lease.beams.ended
        late = lease.held_from_s is not None and lease.speculation.is_fixed and not ended
        return Fallback.LATE if late else None

    def decided(self, lease: Lease, fed: Fed, num_levels: int, num_given_up: int, now: float) -> int:
        """Do as `committed` for what a step of a beam search decided."""
        for _ in range(num_levels - 1):
            lease.shares.note(0)
        if num_levels - 1 < fed.depth:
            lease.shares.note(None)
        if not fed.num_drafts:
            lease.shares.forget()
        self._metrics.note_parked("verified", fed.num_drafts)
        self._metrics.note_parked("pruned", num_given_up)
        num_wasted, lease.num_wasted = lease.num_wasted, 0
        lease.goes_on(now)
        return num_wasted

    def committed(
        self, lease: Lease, r: Ready, decided: Decided, ids: Sequence[int], foretold: Sequence[bool], now: float
    ) -> int:
        """Learn from what was committed, and go on under it; return how many drafts had come too late since the last
        verdict.

        foretold: of what a prediction said, verified or not, whether it came.
        """
        determined = lease.slot.params.determined
        if r.drafter is Drafter.MODEL:
            self._metrics.note_parked("verified", len(r.draft_ids))
        for came in foretold:
            lease.own_shares[Drafter.PREDICTION].note(0 if came else None)
        is_noted = r.drafter is Drafter.PREDICTION or (determined and r.drafter is Drafter.MODEL)
        if r.drafter is not None and not is_noted:
            shares = lease.shares if r.drafter is Drafter.MODEL else lease.own_shares[r.drafter]
            for node in range(decided.num_accepted) if r.tree is None else decided.path:
                shares.note(0 if r.tree is None else r.tree.rank(node))
            if not all_kept(r, decided):
                shares.note(None)
        if r.scaffold is not None and r.scaffold.drafter is not r.drafter:
            lease.own_shares[r.scaffold.drafter].note(None)  # what it cost brought nothing to this step
        if r.drafter is not Drafter.MODEL:
            lease.shares.forget()
        if r.drafter is None:
            for shares in lease.own_shares.values():
                shares.forget()
        committed_len = len(lease.slot.committed) - len(ids)
        given_up, late = lease.parked.advance(ids, committed_len, lease.shares.note if determined else None)
        self._metrics.note_parked("pruned", given_up)
        self._metrics.note_parked("late", late)
        lease.num_wasted += late
        num_wasted, lease.num_wasted = lease.num_wasted, 0
        lease.goes_on(now)
        return num_wasted

    def _of_shape(self, lease: Lease, room: int) -> Sequence[Candidate]:
        """Return what has come of the tree that the request names."""
        shape = lease.speculation.tree
        assert shape is not None, "the request names no tree"
        fitted = shape.fitted(lease.slot.max_len - len(lease.slot.committed) - 1, room)
        if fitted is None or not self._takes_trees:
            return as_chain(lease.parked.chain(min(room, shape.depth)), lease.shares.share(0))
        kind = NodeKind.GUESS if lease.slot.params.determined else NodeKind.LAW
        return lease.parked.within(lease.shares.share, kind, fitted)

    def _of_nodes(self, slot: Slot, nodes: Sequence[Candidate], drafter: Drafter | None) -> Ready:
        """Raises BadTensor."""
        ids, parents = [node.token_id for _, node, _ in nodes], [parent for _, _, parent in nodes]
        is_chain = parents == list(range(-1, len(nodes) - 1))
        if slot.params.determined:
            return Ready(slot, ids, None, None if is_chain else DraftTree(tuple(ids), tuple(parents)), drafter=drafter)
        tree = None if is_chain else DraftTree.checked(ids, parents)
        guessed = nodes[0][1].kind is NodeKind.GUESS and slot.params.lenience == 1.0
        return Ready(slot, ids, None if guessed else self._laws(nodes, tree), tree, guessed, drafter)

    def _laws(self, nodes: Sequence[Candidate], tree: DraftTree | None) -> list[RowLaw]:
        """Return what the children of each inner node were drawn from, in the order of `DraftTree.inner`."""
        inner = list(range(-1, len(nodes) - 1)) if tree is None else tree.inner
        laws = list[RowLaw]()
        for parent in inner:
            children = [node for _, node, at in nodes if at == parent]
            law = children[0].law
            if children[0].kind is NodeKind.GUESS:
                laws.append(one_hot(children[0].token_id, self._vocab_size))
            elif isinstance(law, RowLaw):
                laws.append(law)
            elif law is not None:
                laws.append(decode_law(*law, self._vocab_size, [child.token_id for child in children]))
            else:
                raise BadTensor("distributions are missing, and acceptance is by rejection at a temperature above 0")
        return laws


def _wanted(lease: Lease) -> int:
    """Return how many draft tokens the request names for each step, as far as there is room."""
    tree = lease.speculation.tree
    return min(lease.speculation.num_draft_tokens if tree is None else tree.most_nodes, lease.room)
