"""From what is parked, or what the slot's own drafter says, to what a step verifies; and what its outcome teaches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from target_service.decide_on_device import Decided
from target_service.jobs import Fallback
from target_service.lease import Candidate, Candidates, Delivered, Draft, Lease, Part, Ready, Source
from target_service.own_drafts import OwnDrafts
from target_service.parked import ParkedNode
from target_service.united import in_turn, joined, laid_over, outcomes, said_in

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
            nodes = lease.beams.candidates(lease.first.shares)[: max(0, most)]
            return Candidates(lease, nodes, len(nodes) if lease.speculation.is_fixed else 0)
        found = self._drafted(lease)
        forced = self.or_forced(found)
        return found if lease.speculation.is_fixed and len(forced.nodes) < _wanted(lease) else forced

    def or_forced(self, found: Candidates) -> Candidates:
        """Return what the grammar leaves no choice of in place of what was found, where that is more tokens: guesses,
        and verified like any.
        """
        lease = found.lease
        if not lease.slot.params.grammar:
            return found
        room = min(lease.room, lease.speculation.num_draft_tokens or lease.room)
        forced = [ParkedNode(token_id) for token_id in self._keeper.sampling_state(lease.slot).forced()[:room]]
        if len(forced) <= sum(found.gains):
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
        is_drafted = any(each for _, each in lease.job.tickets)
        asked = self._own.asked(lease.slot, insists=bool(num_fixed), is_drafted=is_drafted)
        for kind in asked:  # what a grammar masks grows nothing
            assert kind.own is not None, "a model drafts in the target"
            state, shares = self._keeper.sampling_state(lease.slot), lease.own_shares[kind.own]
            most = min(room, num_fixed or room)
            own = Part(kind.own, self._own.candidates(lease.slot, kind, state, shares, most), most)
            nodes = own.nodes
            if nodes and kind.unites and lease.slot.params.lenience == 1.0:
                return self._united(lease, self._delivered(lease, room), own)
            if nodes:
                return self._chosen(lease, [own])
        return self._united(lease, self._delivered(lease, room))

    def _delivered(self, lease: Lease, room: int) -> list[Part]:
        """Return what each draft delivered, nothing of some.

        Whether what was drawn first is here must not follow from what was drawn to be tested behind it: so a draft of
        several that is not waited for is absent from the step, whatever comes of it while the others are.
        """
        speculation, drafts = lease.speculation, lease.drafts
        most = 0 if speculation.tree is not None else min(room, speculation.num_draft_tokens or room)
        if len(drafts) > 1 and not lease.slot.params.determined and lease.held_from_s is None:
            for draft in drafts:
                draft.absent_len = 0 if draft.live else lease.length
        return [
            Part(each, () if each.absent_len == lease.length else self._parked(lease, each, room), most)
            for each in drafts
        ]

    def _parked(self, lease: Lease, draft: Delivered, room: int) -> Sequence[Candidate]:
        num_fixed, params, share = lease.speculation.num_draft_tokens, lease.slot.params, draft.shares.share
        if lease.speculation.tree is not None:
            return self._of_shape(lease, draft, room)
        if self._takes_trees and params.determined and not num_fixed and params.lenience == 1.0:
            return draft.parked.best(share, room)
        return as_chain(draft.parked.chain(min(room, num_fixed or room)), share(0))

    def _united(self, lease: Lease, delivered: Sequence[Part], own: Part | None = None) -> Candidates:
        """Return one tree of what was delivered, and of a chain of the target's own; with lenience, which is of chains
        alone, the first of them.
        """
        named = lease.speculation.tree
        if own is not None and named is not None:
            depth = min(named.depth, lease.room)
            own = Part(own.whose, own.nodes[:depth], depth)
        parts = [part for part in (*delivered, *(() if own is None else (own,))) if part.nodes]
        if not self._takes_trees or lease.slot.params.lenience < 1.0:
            del parts[1:]
        return replace(self._chosen(lease, parts), num_here=[len(part.nodes) for part in delivered])

    def _chosen(self, lease: Lease, parts: Sequence[Part]) -> Candidates:
        """Return what a step might verify of these."""
        speculation, slot = lease.speculation, lease.slot
        if not parts:
            return Candidates(lease)
        nodes, order = parts[0].nodes if len(parts) == 1 else (), list[tuple[float, int]]()
        is_walked = slot.params.determined or slot.params.lenience < 1.0
        if len(parts) > 1 or (not is_walked and parts[0].most and parts[0].nodes[0][1].kind is NodeKind.LAW):
            shares = [lease.shares_of(part.whose).share(0) for part in parts]
            most = min(speculation.max_draft_tokens, slot.most_cached - len(slot.committed))
            if is_walked:
                nodes = laid_over(parts, shares, most, named=speculation.is_fixed)
            else:
                order = in_turn(parts, shares, most, named=speculation.is_fixed)
        must = len(order or nodes) if speculation.is_fixed else 0
        drafter = _drafter_of(part.whose for part in parts)
        return Candidates(lease, nodes, must, drafter, parts=parts, order=order)

    def lacking(self, found: Candidates) -> list[tuple[Delivered, float]]:
        """Return the drafts of which more may come than is here, each with the chance that its next guess would be
        kept; none that has said all that was named.
        """
        lease = found.lease
        if lease.beams is not None:
            chance = self._lacking_beams(lease, lease.beams)
            return [] if chance is None else [(lease.first, chance)]
        lacking = list[tuple[Delivered, float]]()
        left, are_drawn = lease.speculation.max_draft_tokens, len(lease.drafts) > 1 and not lease.slot.params.determined
        for draft, num_here in zip(lease.drafts, found.num_here or (), strict=False):
            wanted = min(_wanted(lease), left)
            left -= wanted
            if not draft.live or num_here >= lease.room or draft.parked.ended:
                continue
            if draft.reads_features and len(lease.slot.cached) < len(lease.slot.committed) - 1:
                continue  # it reads rows of what is fed in this step
            if lease.speculation.is_fixed:
                lacking += [(draft, 1.0)] if num_here < wanted else []
                continue
            if are_drawn and num_here:
                continue  # how much of it is here may follow from what it drew, and others' draws may come meanwhile
            chance = draft.shares.share(0) ** (len(draft.parked.chain(lease.room)) + 1)
            for part in found.parts:
                chance *= 1.0 if part.whose is draft else 1.0 - lease.shares_of(part.whose).share(0)
            lacking.append((draft, chance))
        return lacking

    def _lacking_beams(self, lease: Lease, beams: Beams) -> float | None:
        if not lease.first.live or beams.num_here >= beams.depth or beams.ended or beams.is_behind(lease.slot):
            return None
        return 1.0 if lease.speculation.is_fixed else lease.first.shares.share(0) ** (beams.num_here + 1)

    def ready(self, found: Candidates, count: int, with_scaffold: bool = False) -> Ready:
        """Return the slot as it goes into the step, with so many of its candidates, and the scaffold of those."""
        ready = self._with_candidates(found, count)
        if not with_scaffold or found.scaffold is None:
            return ready
        return replace(ready, scaffold=found.scaffold.beside(len(ready.draft_ids)))

    def _with_candidates(self, found: Candidates, count: int) -> Ready:
        lease, slot = found.lease, found.lease.slot
        if not count:
            return Ready(slot, [], None, fallback=self.fallback(lease, is_here=bool(found.nodes or found.order)))
        try:
            return self._of_candidates(found, count)
        except _RefusedError as refused:
            log.warning("refused drafts of slot %d: %s", slot.key[1], refused, extra=about(slot=slot.key[1]))
            self._metrics.proposals_refused.inc()
            self._metrics.note_parked("refused", refused.draft.parked.clear())
            refused.draft.refused = str(refused)
            return Ready(slot, [], None, fallback=Fallback.REFUSED)

    def _of_candidates(self, found: Candidates, count: int) -> Ready:
        """Raises _RefusedError."""
        slot, parts, nodes = found.lease.slot, found.parts, found.nodes[:count]
        if found.order:
            counts = zip(parts, found.counts(count), strict=True)
            parts = [Part(part.whose, part.nodes[:num]) for part, num in counts if num]
            tree = joined(parts)
        else:
            tree = DraftTree.checked([draft.token_id for _, draft, _ in nodes], [parent for _, _, parent in nodes])
        said = [(part.whose, own) for part in parts if (own := said_in(tree, part))]
        sources = [Source(whose, {node: draft.rank for node, draft in own.items()}, own) for whose, own in said]
        drafter = _drafter_of(whose for whose, _ in said) if said else found.drafter
        is_chain = tree.parents == tuple(range(-1, len(tree.ids) - 1))
        ready = Ready(slot, list(tree.ids), None, None if is_chain else tree, drafter=drafter, sources=sources)
        if slot.params.determined:
            return ready
        if len(said) < 2 and is_chain:
            drafts = list(said[0][1].values()) if said else [draft for _, draft, _ in nodes]
            guessed = drafts[0].kind is NodeKind.GUESS and slot.params.lenience == 1.0
            laws = None if guessed else [self._law(said[0][0] if said else None, [draft]) for draft in drafts]
            return replace(ready, draft_laws=laws, guessed=guessed)
        drawn: dict[int, list[Drawn]] = {}
        for whose, own in said:
            for parent, children in _drawn_after(tree, own).items():
                law = self._law(whose, [own[child] for child in children])
                drawn.setdefault(parent, []).append(Drawn(law, tuple(children)))
        return replace(ready, tree=tree, drawn=drawn)

    def fallback(self, lease: Lease, *, is_here: bool = False) -> Fallback | None:
        """Return why a step has no drafts, where it was to have some. is_here: some have come, and are left out."""
        if any(draft.refused is not None for draft in lease.drafts):
            return Fallback.REFUSED
        ended = all(draft.parked.ended for draft in lease.drafts) if lease.beams is None else lease.beams.ended
        if lease.held_from_s is not None and lease.speculation.is_fixed and not ended and not is_here:
            return Fallback.LATE
        return Fallback.DOES_NOT_PAY if is_here or lease.is_passed_over else None

    def decided(self, lease: Lease, fed: Fed, num_levels: int, num_given_up: int, now: float) -> int:
        """Do as `committed` for what a step of a beam search decided."""
        shares = lease.first.shares
        for _ in range(num_levels - 1):
            shares.note(0)
        if num_levels - 1 < fed.depth:
            shares.note(None)
        if not fed.num_drafts:
            shares.forget()
        self._metrics.note_parked("verified", fed.num_drafts)
        self._metrics.note_parked("pruned", num_given_up)
        num_wasted = lease.first.num_wasted
        lease.goes_on(now)
        return num_wasted

    def committed(
        self, lease: Lease, r: Ready, decided: Decided, ids: Sequence[int], foretold: Sequence[bool], now: float
    ) -> list[int]:
        """Learn from what was committed, and go on under it; return how many draft tokens of each draft had come too
        late since the last verdict.

        foretold: of what a prediction said, verified or not, whether it came.
        """
        determined, whose = lease.slot.params.determined, [source.whose for source in r.sources]
        for came in foretold:
            lease.own_shares[Drafter.PREDICTION].note(0 if came else None)
        path = list(range(decided.num_accepted) if r.tree is None else decided.path)
        is_cut = len(path) > len(ids)
        del path[len(ids) :]  # behind the end of the answer nothing came, whatever was accepted there
        tree = r.tree or DraftTree(tuple(r.draft_ids), tuple(r.parents))
        for source, rank in outcomes(tree, r.sources, path, determined=determined):
            is_noted = determined and isinstance(source.whose, Delivered)  # below, for every node that has come
            if not is_noted and source.whose is not Drafter.PREDICTION:
                lease.shares_of(source.whose).note(rank)
        if r.scaffold is not None and r.scaffold.drafter is not r.drafter:
            lease.own_shares[r.scaffold.drafter].note(None)  # what it cost brought nothing to this step
        if not any(isinstance(each, Drafter) for each in whose):
            for shares in lease.own_shares.values():
                shares.forget()
        committed_len, num_wasted = len(lease.slot.committed) - len(ids), list[int]()
        for draft in lease.drafts:
            if draft not in whose:
                draft.shares.forget()
            num_given_up, num_late = draft.parked.advance(ids, committed_len, draft.shares.note if determined else None)
            self._metrics.note_parked("pruned", num_given_up)
            self._metrics.note_parked("late", num_late)
            num_wasted.append(draft.num_wasted + num_late)
            if determined and is_cut and draft in whose:
                draft.shares.note(None)
        self._metrics.note_parked(
            "verified", len(set().union(*(s.ranks for s in r.sources if s.whose in lease.drafts)))
        )
        lease.goes_on(now)
        return num_wasted

    def _of_shape(self, lease: Lease, draft: Delivered, room: int) -> Sequence[Candidate]:
        """Return what has come of the tree that the request names."""
        shape = lease.speculation.tree
        assert shape is not None, "the request names no tree"
        fitted = shape.fitted(lease.slot.max_len - len(lease.slot.committed) - 1, room)
        if fitted is None or not self._takes_trees:
            return as_chain(draft.parked.chain(min(room, shape.depth)), draft.shares.share(0))
        kind = NodeKind.GUESS if lease.slot.params.determined else NodeKind.LAW
        return draft.parked.within(draft.shares.share, kind, fitted)

    def _law(self, whose: Delivered | Drafter | None, siblings: Sequence[Draft]) -> RowLaw:
        """Return what siblings were drawn from. Raises _RefusedError."""
        law = siblings[0].law
        if siblings[0].kind is NodeKind.GUESS:
            return one_hot(siblings[0].token_id, self._vocab_size)
        if isinstance(law, RowLaw):
            return law
        assert isinstance(whose, Delivered), "a draw of the target's own came over the wire"
        if law is None:
            why = "distributions are missing, and acceptance is by rejection at a temperature above 0"
            raise _RefusedError(why, whose)
        try:
            return decode_law(*law, self._vocab_size, [each.token_id for each in siblings])
        except BadTensor as error:
            raise _RefusedError(str(error), whose) from None


class _RefusedError(Exception):
    """What a draft delivered breaks a rule."""

    def __init__(self, why: str, draft: Delivered) -> None:
        super().__init__(why)
        self.draft = draft


def _drafter_of(whose: Iterable[Delivered | Drafter]) -> Drafter:
    """Return the name of sources together."""
    each = list(whose)
    own = next((source for source in each if isinstance(source, Drafter)), None)
    if own is None:
        return Drafter.MODEL if len(each) == 1 else Drafter.MODEL_AND_MODEL
    return own if len(each) == 1 else next(union for union in Drafter if union.unites and union.own is own)


def _drawn_after(tree: DraftTree, said: Mapping[int, Draft]) -> dict[int, list[int]]:
    """Return, by parent, what a source drew there, in order."""
    found: dict[int, list[int]] = {}
    for node, draft in said.items():
        if draft.kind is NodeKind.LAW:
            found.setdefault(tree.parents[node], []).append(node)
    return found


def _wanted(lease: Lease) -> int:
    """Return how many draft tokens the request names for each step, as far as there is room."""
    tree = lease.speculation.tree
    return min(lease.speculation.num_draft_tokens if tree is None else tree.most_nodes, lease.room)
