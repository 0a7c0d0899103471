"""Leases with several drafters, and trees of what they propose."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.papers.merging import merge
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.drafting.budget import VerifyChoice
from target_service.drafting.draft_chooser import DraftChooser
from target_service.drafting.proposal import Proposal
from target_service.drafting.slot_candidates import Candidates
from target_service.leases.draft_buffer import BufferedToken
from target_service.leases.lease import Lease, SlotDrafter, SlotDraftWorker

PROMPT = [7, 8, 9]
VOCAB = 3
UNION = Drafter.NGRAM_AND_MODEL
METRICS = WorkerMetrics("target")
GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=1.0, acceptance=AcceptanceRule.COUPLED)
USUAL = (0.6, 0.5)
"""Acceptance probability of what a draft proposes first, and of the chain's."""
Token = tuple[int, Any]
"""A draft token, and what it was sampled from or None."""


def chain_of(tokens: Sequence[Token], prob: float, max_len: int = 0) -> CandidateTree:
    tree = DraftTree()
    for depth, (token_id, _) in enumerate(tokens):
        tree.add(depth - 1, token_id, prob=prob ** (depth + 1))
    return CandidateTree(tree, [law for _, law in tokens], prob, max_len)


class Chain:
    """The slot's own drafter: proposes these."""

    def __init__(self, tokens: Sequence[Token], name: Drafter) -> None:
        self._tokens = tokens
        self._name = name

    def worthwhile_drafters(self, slot: Any, **how: bool) -> Iterator[Drafter]:
        if self._tokens:
            yield self._name

    def max_len(self, drafter: Drafter) -> int:
        return 64

    def has_extra_rows(self, slot: Any) -> bool:
        return False

    def candidates(self, slot: Any, name: Drafter, state: Any, shares: Any, max_tokens: int) -> CandidateTree:
        return chain_of(self._tokens[:max_tokens], shares.prob(0), max_tokens)


def made(
    params: SamplingParams,
    own: Sequence[Token],
    probs: Sequence[float] = USUAL,
    name: Drafter = UNION,
    **speculation: Any,
) -> tuple[DraftChooser, Lease]:
    """probs: of what each draft says, and last of the chain. name: of the slot's own drafter."""
    slot: Any = SimpleNamespace(
        committed=list(PROMPT), cached=PROMPT[:-1], max_len=99, max_cached_len=99, params=params
    )
    slot.scheduling = Scheduling()
    slot.key = (1, 1)
    *of_drafts, of_own = (SlotAcceptance(RankAcceptance()) for _ in probs)
    for shares, prob in zip((*of_drafts, of_own), probs, strict=True):
        shares.first = prob
    drafts = [SlotDraftWorker(Drafter.MODEL, shares, ticket, True) for ticket, shares in enumerate(of_drafts)]
    job: Any = SimpleNamespace(tickets=[(draft.ticket, True) for draft in drafts])
    spec = Speculation(**{"max_draft_tokens": 16, **speculation})
    lease = Lease(job, slot, spec, drafts, {Drafter.NGRAM: SlotDrafter(Drafter.NGRAM, of_own)}, 0.0)
    lease.begin_step(0.0)
    keeper: Any = SimpleNamespace(sampling_state=lambda slot: None)
    chain: Any = Chain(own, name)
    return DraftChooser(chain, keeper, cast(Any, None), METRICS, VOCAB, supports_trees=True, merge=merge), lease


def park(draft: SlotDraftWorker, chain: Sequence[Token]) -> None:
    """Draws, as though they had been delivered."""
    node = ROOT
    for token_id, law in chain:
        node = add(draft, node, token_id, law)


def add(draft: SlotDraftWorker, parent: int, token_id: int, law: Any) -> int:
    draft.buffer.tokens.append(BufferedToken(NodeKind.SAMPLED, 0, law, None, None))
    return draft.buffer.tree.add(parent, token_id)


def guesses(*ids: int) -> list[Token]:
    return [(token_id, None) for token_id in ids]


def deliver(lease: Lease, paths: Sequence[Sequence[int]], draft: int = 0) -> None:
    """Guesses, of which the first path is the likeliest."""
    ids, parents, ranks, places = list[int](), list[int](), list[int](), {(): ROOT}
    for path in paths:
        for depth in range(1, len(path) + 1):
            at, parent = tuple(path[:depth]), places[tuple(path[: depth - 1])]
            if at not in places:
                places[at] = len(ids)
                ranks.append(parents.count(parent))
                ids.append(path[depth - 1])
                parents.append(parent)
    nodes = Delivery(draft, len(PROMPT), ids, parents, ranks, [NodeKind.DETERMINISTIC] * len(ids), None)
    lease.drafts[draft].buffer.insert(nodes, lease.slot.committed, 1 << 20)


def proposal_of(drafting: DraftChooser, found: Candidates, num_offers: int) -> Proposal:
    return drafting.proposal(found, VerifyChoice(num_offers, False))


class WithRows(Chain):
    """It has a row fed behind the last of a step's draft tokens."""

    def has_extra_rows(self, slot: Any) -> bool:
        return True

    def extra_rows(self, slot: Any, parents: Sequence[int]) -> ExtraRows:
        return ExtraRows(Drafter.NGRAM, [2], [len(parents) - 1], width=1, depth=1)
