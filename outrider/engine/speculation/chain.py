"""Chains of draft tokens that the target's own drafters propose: no message, and no wait."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engine.sampling.coupled import coupled_ranked
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.candidates import CandidateTree, Distribution
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.slots import Slot

NextDistribution = Callable[[LogitRow], RowLaw | None]
"""Returns the distribution after a row's draft prefix, each one token longer than the one before; None for nothing."""


def propose_chain(
    slot: Slot,
    state: SamplingState,
    shares: SlotShares,
    max_tokens: int,
    next_distribution: NextDistribution,
    *,
    is_counted: bool = False,
) -> CandidateTree:
    """Return a chain of at most max_tokens draft tokens, fewer where there is no distribution for the next.

    is_counted: distributions are a table's, of which one without a choice makes a deterministic draft token.
    """
    params = slot.params
    tree = DraftTree()
    distributions = list[Distribution | None]()
    prob = shares.share(0)
    for depth in range(max_tokens):
        row = LogitRow(state, tuple(tree.ids))
        if state.failure(row.draft_prefix) is not None:
            break  # the target ends the answer here
        try:
            law = next_distribution(row)
        except NonFiniteLogits:
            break
        if law is None:
            break
        position = len(slot.committed) + depth
        sampled_from = None
        if params.greedy:
            token_id = law.id_of(0)
        elif params.determined:
            token_id = coupled_ranked(law, params, position, 1)[0][0]
        elif is_counted and law.scores.size == 1:
            token_id = law.id_of(0)
        elif depth and distributions[-1] is None:
            break  # a deterministic draft token is matched, and what follows it would be tested
        else:
            sampled_from = law.normalised()
            numbers = host_slot_uniforms([params], [len(slot.committed)], [position], [Purpose.OWN_DRAFT])
            token_id = sampled_from.draw(float(numbers[0, 0]))
        tree.add(depth - 1, token_id, prob=prob ** (depth + 1))
        distributions.append(sampled_from)
    return CandidateTree(tree, distributions, prob, max_tokens if params.lenience == 1.0 else 0)


def propose_by_logits(
    slot: Slot, state: SamplingState, shares: SlotShares, max_tokens: int, logits: HostLogits | None
) -> CandidateTree:
    """Return a chain of which token j follows row j of some logits, whatever was proposed before it; an empty one
    without logits.
    """

    def next_distribution(row: LogitRow) -> RowLaw | None:
        depth = len(row.draft_prefix)
        if logits is None or depth >= logits.num_rows:
            return None
        return logits.law_if_any(depth, row)

    return propose_chain(slot, state, shares, max_tokens, next_distribution)
