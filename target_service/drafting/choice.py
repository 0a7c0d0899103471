"""Which draft tokens a slot's next step might verify, which of them it does, and what their outcome teaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.engine.sampling.row_law import one_hot
from outrider.engine.sampling.wire_tensors import decode_law
from outrider.engine.speculation.candidates import CandidateTree, JoinedTree, Offer, join
from outrider.engine.speculation.draft_tree import NO_DRAFT_TOKENS, DraftTree
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.speculation import AUTO
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.codec import BadTensor
from target_service.drafting.budget import VerifyChoice, VerifyDemand
from target_service.drafting.own_drafts import OwnDrafts
from target_service.drafting.proposal import Draw, Proposal
from target_service.leases.hold import PendingDraft
from target_service.leases.jobs import Fallback
from target_service.leases.lease import DeliveredDrafts, DraftSource, Lease
from target_service.leases.leases import Leases

Merge = Callable[[Sequence[CandidateTree], int, bool, bool], list[Offer]]
"""Orders what several drafters propose. It is given their trees, the most offers, whether the request names how many
are verified, and whether draft tokens are accepted as far as they match.
"""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a slot's step might verify."""

    lease: Lease
    trees: Mapping[DraftSource, CandidateTree] = field(default_factory=dict)
    """What each drafter proposes, in the order in which draws are tested; none of a beam search."""
    offers: Sequence[Offer] = ()
    """Best first, where the request names no number. Some may bring no token."""
    drafter: Drafter | None = None
    """The target's own drafter that makes its draft tokens once it is known how many are verified, since most of them
    never are; None: they are made."""
    rows_beside: ExtraRows | None = None
    """Rows that the slot's drafter would have fed beside all of it, for later steps' sake."""

    @property
    def num_expected(self) -> float:
        """The sum of the acceptance probabilities of all offers. A sampled chain counts as long as it might have been,
        so that no sampled token decides it.
        """
        return sum(offer.prob for offer in self.offers)

    @property
    def demand(self) -> VerifyDemand:
        """What the budget reads of it: nothing that was sampled."""
        lease, shape, rows = self.lease, self.lease.speculation.tree, self.rows_beside
        is_fixed = lease.speculation.is_fixed
        probs = [offer.prob for offer in self.offers]
        num_required = max_rows = len(self.offers) if is_fixed else 0
        is_whole = shape is not None and not lease.slot.params.determined and _is_exact(lease)
        if shape is not None and is_whole and num_required:
            num_trees = sum(bool(candidates.tree.ids) for candidates in self.trees.values())
            max_rows = min(shape.most_nodes * num_trees, lease.speculation.max_draft_tokens)
            probs = lease.first.chain_probs(shape.depth)
        demand = VerifyDemand(
            probs,
            num_required,
            max_rows,
            is_whole=is_whole,
            is_fixed=is_fixed,
            num_pending=lease.num_pending,
            scheduling=lease.slot.scheduling,
            ready_s=lease.ready_s,
        )
        if rows is None:
            return demand
        cost_rows = len(rows.ids)
        if all(source.drafter is rows.drafter for source in self.trees):
            cost_rows += len(self.offers)  # which came of earlier such rows
        gain = rows.gain(lease.own_sources[rows.drafter].shares)
        return replace(demand, extra_rows=len(rows.ids), extra_gain=gain, extra_cost_rows=cost_rows)

    def num_after(self, choice: VerifyChoice) -> int:
        """Return how many tokens the slot's cache holds after a step with this choice."""
        num_tokens = len(self.lease.slot.cached) + self.lease.num_pending
        for offer in self.offers[: choice.num_drafts]:
            num_tokens += bool(offer.nodes or self.drafter)
        if choice.with_extra_rows and self.rows_beside is not None:
            num_tokens += len(self.rows_beside.ids)
        return num_tokens


@dataclass(frozen=True, slots=True)
class Drafting:
    """Chooses among the drafters of a slot."""

    own: OwnDrafts
    keeper: SlotKeeper[Slot]
    leases: Leases
    metrics: WorkerMetrics
    vocab_size: int
    takes_trees: bool
    merge: Merge

    # candidates

    def candidates(self, lease: Lease) -> Candidates:
        """Return what the slot's next step might verify: what the drafter proposes of which most tokens are expected,
        or the tokens that the grammar forces, where these are more. Where a number or a tree is named, it is the first
        of the target's own drafters that has something, or else what is delivered.

        A slot that names how many are verified waits for those, unless as many are forced.
        """
        if lease.beams is not None:
            return Candidates(lease, offers=lease.beams.offers(lease.slot, lease.first.shares))
        found = self._proposed(lease)
        forced = self.or_forced(found)
        if lease.speculation.is_fixed and len(forced.offers) < _num_named(lease):
            return found
        return forced

    def or_forced(self, found: Candidates) -> Candidates:
        """Return the tokens that the grammar forces in place of `found`, where these are more than are expected of it:
        deterministic, and verified like any.
        """
        lease = found.lease
        if not lease.slot.params.grammar:
            return found
        forced_ids = self.keeper.sampling_state(lease.slot).forced()[: _max_chain(lease)]
        if len(forced_ids) <= found.num_expected:
            return found
        tree = DraftTree.of(forced_ids, range(-1, len(forced_ids) - 1))
        forced = CandidateTree(tree, [None] * len(forced_ids), 1.0)
        return Candidates(lease, {DraftSource(None, lease.first.shares): forced}, forced.offers())

    def with_rows_beside(self, found: Candidates) -> Candidates:
        """Return the candidates with the rows that the slot's drafter would have fed beside all of them."""
        lease = found.lease
        if not self.own.feeds_rows(lease.slot) or not lease.max_drafts:
            return found  # there will be no later draft tokens
        return replace(found, rows_beside=self._rows_beside(lease, join(list(found.trees.values()), found.offers).tree))

    def _rows_beside(self, lease: Lease, tree: DraftTree) -> ExtraRows | None:
        """Return the rows to be fed beside a tree of draft tokens; None for nothing, or where there is no memory."""
        rows = self.own.rows_beside(lease.slot, tree.parents)
        if rows is None or len(lease.slot.committed) + len(tree) + len(rows.ids) > lease.slot.most_cached:
            return None
        return rows

    def _proposed(self, lease: Lease) -> Candidates:
        if not lease.max_drafts:
            return Candidates(lease)
        slot = lease.slot
        shape = lease.speculation.tree
        found = list[Candidates]()
        delivered = self._delivered(lease)
        is_drafted = any(is_drafted for _, is_drafted in lease.job.tickets)
        insists = lease.speculation.num_draft_tokens != AUTO
        has_delivered = any(candidates.tree.ids for candidates in delivered.values())
        is_bound = lease.speculation.is_fixed or bool(slot.params.grammar)
        is_made_now = is_bound or has_delivered or self.own.feeds_rows(slot)
        for drafter in self.own.asked(slot, insists=insists, is_drafted=is_drafted):
            assert drafter.own is not None, "a draft worker's drafter in the target"
            source = lease.own_sources[drafter.own]
            max_len = min(_likely_chain(lease, source), self.own.max_len(drafter))
            if drafter.is_merged and shape is not None:
                max_len = min(max_len, shape.depth)
            if not (is_made_now or drafter.is_merged):
                nothing = CandidateTree(NO_DRAFT_TOKENS, (), source.shares.share(0))
                offers = [Offer(prob, ()) for prob in source.chain_probs(max_len)]
                found.append(Candidates(lease, {source: nothing}, offers, drafter))
                continue
            own = self._made(lease, drafter, source, max_len)
            if not own.tree.ids:
                continue
            trees = {source: own}
            if drafter.is_merged and _is_exact(lease):
                trees = {**delivered, source: own}
            found.append(self._together(lease, trees))
            if lease.speculation.is_fixed:
                return found[0]
        found.append(self._together(lease, delivered))
        return max(found, key=lambda each: each.num_expected)

    def _made(self, lease: Lease, drafter: Drafter, source: DraftSource, max_len: int) -> CandidateTree:
        """Return at most max_len draft tokens of one of the target's own drafters."""
        state = self.keeper.sampling_state(lease.slot)
        return self.own.candidates(lease.slot, drafter, state, source.shares, max_len)

    def _delivered(self, lease: Lease) -> dict[DraftSource, CandidateTree]:
        """Return what each draft worker proposes.

        Whether what was sampled first is here must not follow from what was sampled to be tested after it: so a draft
        of several that is not waited for is absent from the step, whatever of it arrives while the others are.
        """
        is_first_try = len(lease.drafts) > 1 and not lease.slot.params.determined and lease.held_from_s is None
        trees = dict[DraftSource, CandidateTree]()
        for draft in lease.drafts:
            if is_first_try:
                draft.is_skipped = not draft.is_active
            if not draft.is_skipped:
                trees[draft] = self._buffered(lease, draft)
        return trees

    def _buffered(self, lease: Lease, draft: DeliveredDrafts) -> CandidateTree:
        """Return what is buffered of one draft: the tree whose shape the request names, the likeliest nodes, or a
        chain.
        """
        buffer, shares = draft.buffer, draft.shares
        if not buffer.tree.ids:
            return CandidateTree(NO_DRAFT_TOKENS, (), shares.share(0))
        is_determined = lease.slot.params.determined
        shape, max_len = lease.speculation.tree, _max_chain(lease)
        if shape is not None:
            shape = shape.fitted(max_len, max_len)
        elif is_determined and not lease.speculation.is_fixed and _is_exact(lease):
            shape = TreeShape(num_nodes=max_len, max_depth=max_len)
        if shape is None or not self.takes_trees:
            if shape is None:
                max_len = _likely_chain(lease, draft)
            nodes = buffer.chain(max_len if shape is None else shape.depth)
            probs = draft.chain_probs(len(nodes))
        else:
            kind = NodeKind.GUESS if is_determined else NodeKind.LAW
            nodes, probs = buffer.likeliest(shares.share, kind, shape)
        tree = buffer.tree.select(nodes)
        tree.probs = probs
        distributions = [buffer.tokens[node].distribution for node in nodes]
        if shape is not None or not _is_exact(lease):
            max_len = 0
        return CandidateTree(tree, distributions, shares.share(0), max_len)

    def _together(self, lease: Lease, trees: Mapping[DraftSource, CandidateTree]) -> Candidates:
        """Return the candidates of several drafters; of the first that has some where the target runs no trees, and
        with lenience, which is of chains. Those of the others stay, so that nobody waits for them.
        """
        if len(trees) > 1 and self.takes_trees and _is_exact(lease):
            max_offers = min(lease.speculation.max_draft_tokens, lease.slot.most_cached - len(lease.slot.committed))
            is_fixed, is_matched = lease.speculation.is_fixed, lease.slot.params.determined
            return Candidates(lease, trees, self.merge(list(trees.values()), max_offers, is_fixed, is_matched))
        for index, candidates in enumerate(trees.values()):
            if candidates.tree.ids:
                return Candidates(lease, trees, candidates.offers(index))
        return Candidates(lease, trees)

    # drafts that have not arrived

    def pending(self, found: Candidates) -> list[PendingDraft]:
        """Return the drafts of which more tokens may arrive than are here, each with the chance that its next one would
        be accepted and no other drafter's. There are none where forced tokens are verified, or a named number of the
        target's own.
        """
        lease, pending = found.lease, list[PendingDraft]()
        if lease.beams is not None:
            prob = lease.beams.pending_prob(lease.slot, lease.first.shares)
            if prob is not None and lease.first.is_active:
                pending.append(PendingDraft(lease, lease.first, 1.0 if lease.speculation.is_fixed else prob))
            return pending
        is_forced = any(source.drafter is None for source in found.trees)
        is_own = bool(found.trees) and found.trees.keys().isdisjoint(lease.drafts)
        if is_forced or (is_own and lease.speculation.is_fixed):
            return pending
        num_here = {source: len(candidates.tree) for source, candidates in found.trees.items()}
        if found.drafter is not None:
            num_here = dict.fromkeys(found.trees, len(found.offers))
        num_left = lease.speculation.max_draft_tokens
        are_sampled = len(lease.drafts) > 1 and not lease.slot.params.determined
        for draft in lease.drafts:
            num_named = min(_num_named(lease), num_left)
            num_left -= num_named
            num_own = num_here.get(draft, 0)
            if not draft.is_active or num_own >= lease.max_drafts or draft.buffer.is_ended:
                continue
            if draft.reads_features and len(lease.slot.cached) < len(lease.slot.committed) - 1:
                continue  # it reads hidden states of what is fed in this step
            if lease.speculation.is_fixed:
                if num_own < num_named:
                    pending.append(PendingDraft(lease, draft, 1.0))
                continue
            if are_sampled and num_own:
                continue  # how much of it is here may follow from what it drew, and other draws may arrive meanwhile
            prob = draft.shares.chain_prob(len(draft.buffer.chain(lease.max_drafts)) + 1)
            for source, num in num_here.items():
                if source is not draft and num:
                    prob *= 1.0 - source.shares.share(0)
            pending.append(PendingDraft(lease, draft, prob))
        return pending

    def fallback(self, lease: Lease, num_drafts: int, *, is_left_out: bool) -> Fallback | None:
        """Return why a step with num_drafts has none, where it was to have some. is_left_out: some are here."""
        if num_drafts:
            return None
        if any(draft.is_refused for draft in lease.drafts):
            return Fallback.REFUSED
        is_late = lease.held_from_s is not None and lease.speculation.is_fixed and not lease.is_ended
        if is_late and not is_left_out:
            return Fallback.LATE
        return Fallback.DOES_NOT_PAY if is_left_out or lease.is_passed_over else None

    # the proposal

    def proposal(self, found: Candidates, choice: VerifyChoice) -> Proposal:
        """Return what the budget has chosen of a slot's candidates, as the forward and the decision take it: nothing
        where what a draft worker delivered breaks a rule.
        """
        lease = found.lease
        if not choice.num_drafts and not choice.with_extra_rows:
            return Proposal(lease.slot, NO_DRAFT_TOKENS)
        if found.drafter is not None:
            (source,) = found.trees
            own = self._made(lease, found.drafter, source, choice.num_drafts)
            if not own.tree.ids:
                return Proposal(lease.slot, NO_DRAFT_TOKENS)
            found = Candidates(lease, {source: own}, own.offers())
        joined = join(list(found.trees.values()), found.offers[: choice.num_drafts])
        draws = self._draws(found, joined)
        if draws is None:
            return self.proposal(Candidates(lease), choice)
        sources = dict[DraftSource, dict[int, int]]()
        for (source, candidates), node_of in zip(found.trees.items(), joined.nodes, strict=True):
            sources[source] = {node: candidates.tree.ranks[own] for own, node in node_of.items()}
        rows_beside = self._rows_beside(lease, joined.tree) if choice.with_extra_rows else None
        return Proposal(lease.slot, joined.tree, draws, sources, rows_beside)

    def _draws(self, found: Candidates, joined: JoinedTree) -> list[Draw] | None:
        """Return the sampled tokens with their distributions; none where all are accepted as far as they match. None
        where a distribution cannot be read.

        Of one drafter's chain each token is a draw, of a distribution of one token where it is deterministic: block
        verification looks at the whole chain.
        """
        draws = list[Draw]()
        if found.lease.slot.params.determined:
            return draws
        num_sources = sum(bool(node_of) for node_of in joined.nodes)
        for (source, candidates), node_of in zip(found.trees.items(), joined.nodes, strict=True):
            is_sampled = any(candidates.distributions[own] is not None for own in node_of)
            if not is_sampled and _is_exact(found.lease):
                continue
            is_chain = num_sources == 1 and joined.tree.is_chain
            siblings = dict[int, list[int]]()
            for own, node in node_of.items():
                if is_chain or candidates.distributions[own] is not None:
                    siblings.setdefault(joined.tree.parents[node], []).append(own)
            for drawn in siblings.values():
                sibling_ids = [candidates.tree.ids[own] for own in drawn]
                distribution = candidates.distributions[drawn[0]]
                if distribution is None:
                    distribution = one_hot(sibling_ids[0], self.vocab_size)
                elif isinstance(distribution, tuple):
                    assert isinstance(source, DeliveredDrafts), "a distribution of the target's own came over the wire"
                    try:
                        distribution = decode_law(*distribution, self.vocab_size, sibling_ids)
                    except BadTensor as error:
                        self.leases.refuse(source.ticket, str(error))
                        self.metrics.note_parked("refused", len(source.buffer.tree))
                        source.buffer.clear()
                        return None
                first, *others = drawn
                draws.append(Draw(node_of[first], distribution))
                for own in others:
                    draws.append(Draw(node_of[own], None))
        return draws


def _is_exact(lease: Lease) -> bool:
    """Return whether acceptance is exact: with lenience, draft tokens are chains that are tested one by one."""
    return lease.slot.params.lenience == 1.0


def _max_chain(lease: Lease) -> int:
    """Return how long a chain of draft tokens may be."""
    return lease.speculation.chain_len(lease.max_drafts)


def _likely_chain(lease: Lease, source: DraftSource) -> int:
    """Return how long a source's chain of draft tokens may be: where no number is named, as long as it is likely."""
    max_len = _max_chain(lease)
    return max_len if lease.speculation.is_fixed else source.shares.likely_len(max_len)


def _num_named(lease: Lease) -> int:
    """Return how many draft tokens the request names for each step, as far as there is room."""
    tree = lease.speculation.tree
    return _max_chain(lease) if tree is None else min(tree.most_nodes, lease.max_drafts)
