"""The choice among a slot's drafters: which draft tokens its next step might verify, and then the proposal that it
verifies.

Called by `step`: `candidates` before the budget, `proposal` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.engine.sampling.token_distribution import TokenDistribution, one_hot
from outrider.engine.sampling.wire_tensors import decode_distribution
from outrider.engine.speculation.candidates import BudgetItem, CandidateTree, Distribution, MergedTree, join
from outrider.engine.speculation.draft_tree import NO_DRAFT_TOKENS, ROOT, DraftTree
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.speculation import AUTO
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.codec import BadTensor
from target_service.drafting.budget import VerifyChoice
from target_service.drafting.own_drafts import OwnDrafts
from target_service.drafting.proposal import Draw, Proposal
from target_service.drafting.slot_candidates import Candidates
from target_service.leases.hold import PendingDraft
from target_service.leases.lease import Lease, SlotDrafter, SlotDraftWorker
from target_service.leases.lease_jobs import Fallback
from target_service.leases.leases import Leases

Merge = Callable[[Sequence[CandidateTree], int, bool, bool], list[BudgetItem]]
"""Function that orders the draft tokens of several drafters, best first. Arguments: their trees, the maximum number of
draft tokens, whether the request fixes their number, whether draft tokens are accepted by equality with the target's
tokens (greedy, coupled) rather than by a random draw."""


@dataclass(frozen=True, slots=True)
class DraftChooser:
    """Chooses which draft tokens of each slot a step may verify. It has no state of its own."""

    own: OwnDrafts
    keeper: SlotKeeper[Slot]
    leases: Leases
    metrics: WorkerMetrics
    vocab_size: int
    supports_trees: bool
    """Whether a step can verify draft trees. If not, it verifies only chains."""
    merge: Merge

    # candidates

    def candidates(self, lease: Lease) -> Candidates:
        """Return the draft tokens that the slot's next step might verify.

        If the request fixes a number of draft tokens or a tree shape: the tokens of the first of the target's own
        drafters that has any; if none has, the delivered tokens. If it fixes neither: the tokens of the drafter with
        the largest expected number of accepted tokens. The tokens that the request's grammar forces are returned
        instead if they are more than that drafter's expected accepted tokens and not fewer than the request fixes.
        """
        if lease.beams is not None:
            return Candidates(lease, budget_items=lease.beams.budget_items(lease.slot, lease.first.acceptance))
        found = self._proposed(lease)
        forced = self.or_forced(found)
        if lease.speculation.is_fixed and len(forced.budget_items) < lease.num_required:
            return found
        return forced

    def or_forced(self, found: Candidates) -> Candidates:
        """Return the tokens that the request's grammar forces, as candidates, if they are more than the accepted tokens
        that `found` is expected to bring; otherwise `found`.

        Forced tokens are deterministic draft tokens, and are verified like others.
        """
        lease = found.lease
        if not lease.slot.params.grammar:
            return found
        forced_ids = self.keeper.sampling_state(lease.slot).forced()[: lease.max_chain]
        if len(forced_ids) <= found.num_expected:
            return found
        tree = DraftTree.of(forced_ids, range(ROOT, len(forced_ids) - 1))  # parents [-1, 0, 1]: a chain
        forced = CandidateTree(tree, [None] * len(forced_ids), 1.0)
        return Candidates(lease, {SlotDrafter(None, lease.first.acceptance): forced}, forced.budget_items())

    def add_extra_rows(self, found: Candidates) -> Candidates:
        """Return the candidates together with the extra rows that one of the slot's drafters adds to a step that
        verifies all of them, in order to make draft tokens for later steps. If no drafter adds any, the result has no
        extra rows.
        """
        lease = found.lease
        if not self.own.has_extra_rows(lease.slot) or not lease.max_depth:
            return found  # rows beside are for later draft tokens, and there will be none
        tree = join(list(found.trees.values()), found.budget_items).tree
        return replace(found, extra_rows=self._extra_rows(lease, tree))

    def _extra_rows(self, lease: Lease, tree: DraftTree) -> ExtraRows | None:
        rows = self.own.extra_rows(lease.slot, tree.parents)
        if rows is None or len(lease.slot.committed) + len(tree) + len(rows.ids) > lease.slot.max_cached_len:
            return None
        return rows

    def _proposed(self, lease: Lease) -> Candidates:
        if not lease.max_depth:
            return Candidates(lease)
        slot = lease.slot
        shape = lease.speculation.tree
        found = list[Candidates]()
        delivered = self._delivered(lease)
        has_fixed_num = lease.speculation.num_draft_tokens != AUTO
        has_delivered = any(candidates.tree.ids for candidates in delivered.values())
        is_bound = lease.speculation.is_fixed or bool(slot.params.grammar)
        is_made_now = is_bound or has_delivered or self.own.has_extra_rows(slot)  # else once the budget has chosen
        for drafter in self.own.worthwhile_drafters(slot, has_fixed_num=has_fixed_num, is_drafted=lease.is_drafted):
            assert drafter.own is not None, "a draft worker's drafter in the target"
            slot_drafter = lease.own_drafters[drafter.own]
            max_len = min(lease.likely_chain(slot_drafter), self.own.max_len(drafter))
            if drafter.is_merged and shape is not None:
                max_len = min(max_len, shape.depth)
            if not (is_made_now or drafter.is_merged):
                found.append(_candidates_to_make(lease, drafter, slot_drafter, max_len))
                continue
            own = self._propose(lease, drafter, slot_drafter, max_len)
            if not own.tree.ids:
                continue
            trees = {slot_drafter: own}
            if drafter.is_merged and lease.is_exact:
                trees = {**delivered, slot_drafter: own}
            found.append(self._together(lease, trees))
            if lease.speculation.is_fixed:
                return found[0]
        found.append(self._together(lease, delivered))
        return max(found, key=lambda candidates: candidates.num_expected)

    def _propose(self, lease: Lease, drafter: Drafter, slot_drafter: SlotDrafter, max_len: int) -> CandidateTree:
        state = self.keeper.sampling_state(lease.slot)
        return self.own.candidates(lease.slot, drafter, state, slot_drafter.acceptance, max_len)

    def _delivered(self, lease: Lease) -> dict[SlotDrafter, CandidateTree]:
        # Whether the tokens that are tested first have arrived must not depend on those that are tested after them. So
        # where several drafts deliver, one that is not waited for is absent from the step, whatever arrives of it while
        # the step waits for the others.
        is_first_try = len(lease.drafts) > 1 and not lease.slot.params.is_deterministic and lease.held_from_s is None
        trees = dict[SlotDrafter, CandidateTree]()
        for draft in lease.drafts:
            if is_first_try:
                draft.is_skipped = not draft.is_active
            if not draft.is_skipped:
                trees[draft] = self._buffered(lease, draft)
        return trees

    def _buffered(self, lease: Lease, draft: SlotDraftWorker) -> CandidateTree:
        buffer = draft.buffer
        acceptance = draft.acceptance
        if not buffer.tree.ids:
            return CandidateTree(NO_DRAFT_TOKENS, (), acceptance.prob(0))
        is_determined = lease.slot.params.is_deterministic
        max_len = lease.max_chain
        shape = lease.speculation.tree
        if shape is not None:
            shape = shape.reduced_to(max_len, max_len)
        elif is_determined and not lease.speculation.is_fixed and lease.is_exact:
            shape = TreeShape(num_nodes=max_len, max_depth=max_len)
        if shape is not None and self.supports_trees:
            kind = NodeKind.SAMPLED
            if is_determined:
                kind = NodeKind.DETERMINISTIC
            nodes, probs = buffer.likeliest(acceptance.prob, kind, shape)
        else:
            if shape is None:
                max_len = lease.likely_chain(draft)
            else:
                max_len = shape.depth
            nodes = buffer.chain(max_len)
            probs = draft.chain_probs(len(nodes))
        tree = buffer.tree.select(nodes)
        tree.probs = probs
        distributions = list[Distribution | None]()
        for node in nodes:
            distributions.append(buffer.tokens[node].distribution)
        if shape is not None or not lease.is_exact:
            max_len = 0
        return CandidateTree(tree, distributions, acceptance.prob(0), max_len)

    def _together(self, lease: Lease, trees: Mapping[SlotDrafter, CandidateTree]) -> Candidates:
        if len(trees) > 1 and self.supports_trees and lease.is_exact:
            max_items = min(lease.speculation.max_draft_tokens, lease.slot.max_cached_len - len(lease.slot.committed))
            is_matched = lease.slot.params.is_deterministic
            budget_items = self.merge(list(trees.values()), max_items, lease.speculation.is_fixed, is_matched)
            return Candidates(lease, trees, budget_items)
        # Without trees, or with lenience, which only chains have, the first drafter's alone are offered. The others'
        # trees stay in the candidates, so that no step waits for them.
        for index, candidates in enumerate(trees.values()):
            if candidates.tree.ids:
                return Candidates(lease, trees, candidates.budget_items(index))
        return Candidates(lease, trees)

    # drafts that have not arrived

    def pending(self, found: Candidates) -> list[PendingDraft]:
        """Return the draft workers from which more draft tokens may arrive, each with the probability that the step
        gains from its next token: it is accepted, and the tokens of all other drafters are rejected.

        The list is empty if forced tokens are verified, or a fixed number of the target's own draft tokens.
        """
        lease = found.lease
        pending = list[PendingDraft]()
        if lease.beams is not None:
            prob = lease.beams.pending_prob(lease.slot, lease.first.acceptance)
            if prob is None or not lease.first.is_active:
                return pending
            if lease.speculation.is_fixed:
                prob = 1.0
            pending.append(PendingDraft(lease, lease.first, prob))
            return pending
        is_forced = any(slot_drafter.drafter is None for slot_drafter in found.trees)
        is_own = bool(found.trees) and found.trees.keys().isdisjoint(lease.drafts)
        if is_forced or (is_own and lease.speculation.is_fixed):
            return pending
        num_here = dict[SlotDrafter, int]()
        for slot_drafter, candidates in found.trees.items():
            num_here[slot_drafter] = len(candidates.tree)
            if found.drafter is not None:  # its tokens are not made yet
                num_here[slot_drafter] = len(found.budget_items)
        num_left = lease.speculation.max_draft_tokens
        are_sampled = len(lease.drafts) > 1 and not lease.slot.params.is_deterministic
        for draft in lease.drafts:
            num_required = min(lease.num_required, num_left)
            num_left -= num_required
            num_own = num_here.get(draft, 0)
            if not draft.is_active or num_own >= lease.max_depth or draft.buffer.is_ended:
                continue
            if draft.needs_features and len(lease.slot.cached) < len(lease.slot.committed) - 1:
                continue  # it drafts from hidden states of this step
            if lease.speculation.is_fixed:
                if num_own < num_required:
                    pending.append(PendingDraft(lease, draft, 1.0))
                continue
            if are_sampled and num_own:
                continue  # how much of it has arrived may depend on its draws, and other draws may arrive meanwhile
            prob = draft.acceptance.chain_prob(len(draft.buffer.chain(lease.max_depth)) + 1)
            for slot_drafter, num in num_here.items():
                if slot_drafter is not draft and num:
                    prob *= 1.0 - slot_drafter.acceptance.prob(0)
            pending.append(PendingDraft(lease, draft, prob))
        return pending

    def fallback(self, lease: Lease, num_draft_tokens: int, *, is_left_out: bool) -> Fallback | None:
        """Return why a step verifies no draft token of a slot: refused, late, or does not pay. None if it verifies
        some, or if none of these is the reason.

        num_draft_tokens: number of the slot's draft tokens that the step verifies. is_left_out: whether the slot had
        draft tokens and the budget chose none of them.
        """
        if num_draft_tokens:
            return None
        if any(draft.is_refused for draft in lease.drafts):
            return Fallback.REFUSED
        is_late = lease.held_from_s is not None and lease.speculation.is_fixed and not lease.is_ended
        if is_late and not is_left_out:
            return Fallback.LATE
        if is_left_out or lease.is_passed_over:
            return Fallback.DOES_NOT_PAY
        return None

    # the proposal

    def proposal(self, found: Candidates, choice: VerifyChoice) -> Proposal:
        """Return the proposal of a slot: its candidates, from the first on, as many as the budget has chosen.

        The proposal has no draft tokens if a delivered distribution turns out to be malformed.
        """
        lease = found.lease
        if not choice.num_draft_tokens and not choice.with_extra_rows:
            return Proposal(lease.slot, NO_DRAFT_TOKENS)
        if found.drafter is not None:
            (slot_drafter,) = found.trees
            made = self._propose(lease, found.drafter, slot_drafter, choice.num_draft_tokens)
            if not made.tree.ids:
                return Proposal(lease.slot, NO_DRAFT_TOKENS)
            found = Candidates(lease, {slot_drafter: made}, made.budget_items())
        joined = join(list(found.trees.values()), found.budget_items[: choice.num_draft_tokens])
        draws = self._draws(found, joined)
        if draws is None:
            return self.proposal(Candidates(lease), choice)
        slot_drafters = dict[SlotDrafter, dict[int, int]]()
        for (slot_drafter, candidates), node_of in zip(found.trees.items(), joined.nodes, strict=True):
            ranks = slot_drafters[slot_drafter] = dict[int, int]()
            for own, node in node_of.items():
                ranks[node] = candidates.tree.ranks[own]
        extra_rows = None
        if choice.with_extra_rows:
            extra_rows = self._extra_rows(lease, joined.tree)
        return Proposal(lease.slot, joined.tree, draws, slot_drafters, extra_rows)

    def _draws(self, found: Candidates, joined: MergedTree) -> list[Draw] | None:
        """Return the draws in the order of the tests; None where a distribution cannot be read.

        The list is empty if all draft tokens are accepted by matching. In a chain of one drafter every token is a draw,
        since block verification looks at the whole chain; a deterministic token is drawn from a distribution of one
        token.

        Example: drafter A drew siblings a, b after the root and drafter B drew b. The draws are a of A, b of A
        (distribution None, i.e. that of the previous draw without a), and b of B.
        """
        lease = found.lease
        draws = list[Draw]()
        if lease.slot.params.is_deterministic:
            return draws
        num_drafters = sum(bool(node_of) for node_of in joined.nodes)
        is_chain = num_drafters == 1 and joined.tree.is_chain
        for (slot_drafter, candidates), node_of in zip(found.trees.items(), joined.nodes, strict=True):
            is_sampled = False
            siblings = dict[int, list[int]]()  # by the parent's node, the drafter's own nodes
            for own, node in node_of.items():
                has_distribution = candidates.distributions[own] is not None
                is_sampled = is_sampled or has_distribution
                if is_chain or has_distribution:
                    siblings.setdefault(joined.tree.parents[node], []).append(own)
            if not is_sampled and lease.is_exact:
                continue
            for drawn in siblings.values():
                distribution = self._distribution(slot_drafter, candidates, drawn)
                if distribution is None:
                    return None
                first, *others = drawn
                draws.append(Draw(node_of[first], distribution))
                for own in others:
                    draws.append(Draw(node_of[own], None))
        return draws

    def _distribution(
        self, slot_drafter: SlotDrafter, candidates: CandidateTree, drawn: Sequence[int]
    ) -> TokenDistribution | None:
        sibling_ids = [candidates.tree.ids[own] for own in drawn]
        distribution = candidates.distributions[drawn[0]]
        if distribution is None:
            return one_hot(sibling_ids[0], self.vocab_size)
        if not isinstance(distribution, tuple):
            return distribution
        assert isinstance(slot_drafter, SlotDraftWorker), "a distribution of the target's own came over the wire"
        try:
            return decode_distribution(*distribution, self.vocab_size, sibling_ids)
        except BadTensor as error:
            self.leases.refuse(slot_drafter.ticket, str(error))
            self.metrics.count_delivered("refused", len(slot_drafter.buffer.tree))
            slot_drafter.buffer.clear()
            return None


def _candidates_to_make(lease: Lease, drafter: Drafter, slot_drafter: SlotDrafter, max_len: int) -> Candidates:
    # a chain of max_len tokens that are made once it is known how many of them are verified
    nothing = CandidateTree(NO_DRAFT_TOKENS, (), slot_drafter.acceptance.prob(0))
    budget_items = list[BudgetItem]()
    for prob in slot_drafter.chain_probs(max_len):
        budget_items.append(BudgetItem(prob, ()))
    return Candidates(lease, {slot_drafter: nothing}, budget_items, drafter)
