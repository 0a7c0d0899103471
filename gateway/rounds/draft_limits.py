"""How an answer is drafted for, by what the request and the gateway say and its workers can. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.generation import GenerationRequest
from outrider.v1 import common_pb2 as pb
from outrider.wire.params import read_draft_logprobs
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.speculation import DEFAULT_TOPK, NumDraftTokens, Speculation
from outrider.wire.tree_shape import TreeShape


def speculation_of(
    request: GenerationRequest, config: GatewayConfig, workers: Sequence[pb.WorkerInfo], num_held: int
) -> Speculation | None:
    """Return what these workers of the answer are told; None where nothing is to be drafted.

    workers: the target, and the draft if there is one; both must be able to do it. num_held: tokens that the answer has
    in the cache of each.
    """
    num_draft_tokens, tree = num_draft_tokens_of(request, config), tree_of(request, config)
    if not longest_draft(request, config):
        return None
    if tree is not None and all(worker.trees for worker in workers):
        num_nodes = min(_room_for_nodes(worker, num_held) for worker in workers if worker.num_kv_blocks)
        tree = tree.fitted(config.max_draft_tokens, min(num_nodes, config.max_draft_tokens))
        if tree is None:
            return None
    elif tree is not None:
        num_draft_tokens, tree = tree.depth, None  # a chain as long as the tree is deep
    options = request.speculation
    kind, size = read_draft_logprobs(config.draft_logprobs)
    return Speculation(
        num_draft_tokens=num_draft_tokens,
        max_draft_tokens=config.max_draft_tokens,
        tree=tree,
        draft_logprobs=options.draft_logprobs or kind,
        draft_topk=min(options.draft_topk or size or DEFAULT_TOPK, workers[0].vocab_size),
        explain=options.explain,
    )


def num_draft_tokens_of(request: GenerationRequest, config: GatewayConfig) -> NumDraftTokens:
    """Return K of the request, or of the gateway for one that names none; AUTO where it names a tree."""
    return request.speculation.num_draft_tokens_or(config.num_draft_tokens)


def longest_draft(request: GenerationRequest, config: GatewayConfig) -> int:
    """Return how many draft tokens a step may accept at most; 0 where nothing is to be drafted."""
    num_draft_tokens, tree = num_draft_tokens_of(request, config), tree_of(request, config)
    if isinstance(num_draft_tokens, int):
        return num_draft_tokens
    return config.max_draft_tokens if tree is None else tree.depth


def tree_of(request: GenerationRequest, config: GatewayConfig) -> TreeShape | None:
    """Return the shape of the answer's drafts; None for chains, and for a beam search. The gateway's own does not hold
    for a request that names K, or lenience, which is of chains alone.
    """
    options = request.speculation
    if request.params.beams is not None:
        return None
    if options.tree is not None or not config.tree:
        return options.tree
    if options.num_draft_tokens is not None or request.params.lenience < 1.0:
        return None
    return TreeShape.parse(config.tree)


def _room_for_nodes(worker: pb.WorkerInfo, num_held: int) -> int:
    """Nodes in its cache, were the answer alone there; a block may have to be copied."""
    return max(0, (worker.num_kv_blocks - 1) * worker.kv_block_size - num_held)
