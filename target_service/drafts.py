"""From what is parked, or what the slot's own drafter says, to what a step verifies; and what its outcome teaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.engine.sampling.row_law import RowLaw, one_hot
from outrider.engine.sampling.tree_acceptance import DraftTree, Drawn
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
from target_service.lease import Beside, Candidate, Candidates, Draft, Lease, Ready, Sources
from target_service.own_drafts import OwnDrafts
from target_service.parked import ParkedNode
from target_service.united import Chances, along, in_turn, joined, laid_over, note_outcome

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
        asked = self._own.asked(lease.slot, insists=bool(num_fixed), is_drafted=lease.job.is_drafted)
        for kind in asked:  # what a grammar masks grows nothing
            assert kind.own is not None, "a model drafts in the target"
            state, shares = self._keeper.sampling_state(lease.slot), lease.own_shares[kind.own]
            own = self._own.candidates(lease.slot, kind, state, shares, min(room, num_fixed or room))
            if own and kind.unites and lease.slot.params.lenience == 1.0:
                return self._united(lease, kind, own, self._delivered(lease, room))
            if own:
                return Candidates(lease, own, len(own) if num_fixed else 0, kind.own)
        return self._delivered(lease, room)

    def _delivered(self, lease: Lease, room: int) -> Candidates:
        num_fixed = lease.speculation.num_draft_tokens
        if lease.speculation.tree is not None:
            nodes = self._of_shape(lease, room)
            return Candidates(lease, nodes, len(nodes))
        if self._takes_trees and lease.slot.params.determined and not num_fixed and lease.slot.params.lenience == 1.0:
            return Candidates(lease, lease.parked.best(lease.shares.share, room))
        nodes = as_chain(lease.parked.chain(min(room, num_fixed or room)), lease.shares.share(0))
        return Candidates(lease, nodes, len(nodes) if num_fixed else 0)

    def _united(self, lease: Lease, kind: Drafter, chain: Sequence[Candidate], delivered: Candidates) -> Candidates:
        """Return one tree of what was delivered and a chain of the target's own; of a kind that makes such trees."""
        speculation, slot = lease.speculation, lease.slot
        depth = speculation.num_draft_tokens if speculation.tree is None else speculation.tree.depth
        depth = min(depth or lease.room, lease.room)
        chain, beside = chain[:depth], Beside(kind, chain[:depth], delivered.num_delivered or 0)
        if not delivered.nodes:
            return Candidates(lease, chain, len(chain) if speculation.is_fixed else 0, kind.own, beside=beside)
        assert kind.own is not None, "it has no part in the target"
        chances = Chances(lease.shares.share(0), lease.own_shares[kind.own].share(0))
        most = min(speculation.max_draft_tokens, slot.most_cached - len(slot.committed))
        if slot.params.determined:
            nodes = laid_over(delivered.nodes, chain, chances, most)
            return Candidates(lease, nodes, len(nodes) if speculation.is_fixed else 0, kind, beside=beside)
        order = in_turn(delivered.nodes, depth, chances, most)
        must = len(order) if speculation.is_fixed else 0
        return Candidates(lease, delivered.nodes, must, kind, beside=replace(beside, order=order))

    def lacking(self, found: Candidates) -> float | None:
        """Return the chance that the next guess would be kept, where more may come than is here; None where not, or
        where all that was named is here.
        """
        lease, num_here = found.lease, found.num_delivered
        if lease.beams is not None:
            return self._lacking_beams(lease, lease.beams)
        if not lease.live or num_here is None or num_here >= lease.room or lease.parked.ended:
            return None
        if lease.wanting is not None and len(lease.slot.cached) < len(lease.slot.committed) - 1:
            return None  # its draft reads rows of what is fed in this step
        if not lease.speculation.is_fixed:
            chance = lease.shares.share(0) ** (len(lease.parked.chain(lease.room)) + 1)
            own = None if found.beside is None else found.beside.drafter.own
            return chance if own is None else chance * (1.0 - lease.own_shares[own].share(0))
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
            return self._of_candidates(found, count)
        except BadTensor as error:
            log.warning("refused drafts of slot %d: %s", slot.key[1], error, extra=about(slot=slot.key[1]))
            self._metrics.proposals_refused.inc()
            self._metrics.note_parked("refused", lease.parked.clear())
            return Ready(slot, [], None, fallback=Fallback.REFUSED)

    def _of_candidates(self, found: Candidates, count: int) -> Ready:
        """Raises BadTensor."""
        slot, nodes, beside = found.lease.slot, found.nodes[:count], found.beside
        if beside is None or not beside.num_delivered:
            return self._of_nodes(slot, nodes, found.drafter)
        if slot.params.determined:
            return self._of_guesses(slot, nodes, beside)
        num_own = sum(is_own for _, is_own in beside.order[:count])
        nodes, chain = found.nodes[: count - num_own], beside.chain[:num_own]
        if not nodes or not chain:
            return self._of_nodes(slot, nodes or chain, Drafter.MODEL if nodes else beside.drafter.own)
        tree = joined(nodes, chain)
        drawn, own = self._drawn(nodes), along(tree, chain)
        for node, (_, draft, _) in zip(own, chain, strict=True):
            if draft.kind is NodeKind.LAW:
                assert isinstance(draft.law, RowLaw), "a draw of the target's own came over the wire"
                drawn.setdefault(tree.parents[node], []).append(Drawn(draft.law, (node,)))
        sources = Sources({node: draft.rank for node, (_, draft, _) in enumerate(nodes)}, own)
        return Ready(slot, list(tree.ids), None, tree, drafter=beside.drafter, drawn=drawn, sources=sources)

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
        determined, kind = lease.slot.params.determined, r.drafter
        is_delivered = kind is Drafter.MODEL or r.sources is not None
        if is_delivered:
            self._metrics.note_parked("verified", len(r.draft_ids) - r.num_own)
        for came in foretold:
            lease.own_shares[Drafter.PREDICTION].note(0 if came else None)
        is_noted = kind is Drafter.PREDICTION or (determined and kind is Drafter.MODEL)
        path = range(decided.num_accepted) if r.tree is None else decided.path
        if r.sources is not None:
            assert kind is not None and kind.own is not None, "two sources have a name"
            tree = r.tree or DraftTree(tuple(r.draft_ids), tuple(r.parents))
            note_outcome(tree, r.sources, path, lease.shares, lease.own_shares[kind.own], determined=determined)
        elif r.drafter is not None and not is_noted:
            shares = lease.shares if r.drafter is Drafter.MODEL else lease.own_shares[r.drafter]
            for node in path:
                shares.note(0 if r.tree is None else r.tree.rank(node))
            if not all_kept(r, decided):
                shares.note(None)
        if r.scaffold is not None and r.scaffold.drafter is not r.drafter:
            lease.own_shares[r.scaffold.drafter].note(None)  # what it cost brought nothing to this step
        if not is_delivered:
            lease.shares.forget()
        if r.drafter in (None, Drafter.MODEL):
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
        if not is_chain:
            return Ready(slot, ids, None, DraftTree.checked(ids, parents), drafter=drafter, drawn=self._drawn(nodes))
        guessed = nodes[0][1].kind is NodeKind.GUESS and slot.params.lenience == 1.0
        laws = None if guessed else [self._law([node]) for _, node, _ in nodes]
        return Ready(slot, ids, laws, guessed=guessed, drafter=drafter)

    def _of_guesses(self, slot: Slot, nodes: Sequence[Candidate], beside: Beside) -> Ready:
        """Return what goes into the step of guesses that are laid over each other."""
        ready, own = self._of_nodes(slot, nodes, beside.drafter), {id(draft) for _, draft, _ in beside.chain}
        tree = DraftTree(tuple(ready.draft_ids), tuple(ready.parents))
        ranks = {node: draft.rank for node, (_, draft, _) in enumerate(nodes) if id(draft) not in own}
        sources = Sources(ranks, along(tree, beside.chain))
        if not ranks or not sources.own:
            return replace(ready, drafter=Drafter.MODEL if ranks else beside.drafter.own)
        return replace(ready, sources=sources)

    def _drawn(self, nodes: Sequence[Candidate]) -> dict[int, list[Drawn]]:
        """Return what was drawn after each node of a tree, from one law each. Raises BadTensor."""
        found: dict[int, list[int]] = {}
        for node, (_, draft, parent) in enumerate(nodes):
            if draft.kind is NodeKind.LAW:
                found.setdefault(parent, []).append(node)
        return {
            parent: [Drawn(self._law([nodes[child][1] for child in children]), tuple(children))]
            for parent, children in found.items()
        }

    def _law(self, siblings: Sequence[Draft]) -> RowLaw:
        """Return what siblings were drawn from. Raises BadTensor."""
        law = siblings[0].law
        if siblings[0].kind is NodeKind.GUESS:
            return one_hot(siblings[0].token_id, self._vocab_size)
        if isinstance(law, RowLaw):
            return law
        if law is None:
            raise BadTensor("distributions are missing, and acceptance is by rejection at a temperature above 0")
        return decode_law(*law, self._vocab_size, [each.token_id for each in siblings])


def _wanted(lease: Lease) -> int:
    """Return how many draft tokens the request names for each step, as far as there is room."""
    tree = lease.speculation.tree
    return min(lease.speculation.num_draft_tokens if tree is None else tree.most_nodes, lease.room)
