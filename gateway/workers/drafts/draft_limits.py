"""Determines the speculation of a choice from its request, the gateway's settings and its workers' abilities. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.generation import GenerationRequest
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.params import read_draft_logprobs
from outrider.wire.requests.speculation import DEFAULT_TOPK, Speculation
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.settings.config import GatewayConfig


def requested_speculation(request: GenerationRequest, config: GatewayConfig) -> Speculation:
    """Return the speculation that a request's own options and the gateway's settings ask for.

    `speculation_of` reduces the result to what the workers support.
    """
    options = request.speculation
    kind, size = read_draft_logprobs(config.draft_logprobs)
    return Speculation(
        num_draft_tokens=options.num_draft_tokens_or(config.num_draft_tokens),
        max_draft_tokens=config.max_draft_tokens,
        tree=_tree_of(request, config),
        draft_logprobs=options.draft_logprobs or kind,
        draft_topk=options.draft_topk or size or DEFAULT_TOPK,
        explain=options.explain,
    )


def speculation_of(
    request: GenerationRequest, config: GatewayConfig, workers: Sequence[pb.WorkerInfo], num_cached: int
) -> Speculation | None:
    """Return the speculation with which a choice runs on these workers. None = decoding without draft tokens, because
    speculation is off or no node of a tree fits into a KV cache.

    workers: the target, then the choice's draft workers. All must be able to run the result. num_cached: number of the
    choice's tokens for which each worker's cache needs room besides draft tokens.

    If a worker cannot run trees, a tree becomes a chain as long as the tree is deep. If a worker's KV cache has no room
    for the tree, the tree gets fewer nodes.
    """
    requested = requested_speculation(request, config)
    if requested.is_plain:
        return None
    speculation = replace(requested, draft_topk=min(requested.draft_topk, workers[0].vocab_size))
    if requested.tree is None:
        return speculation
    if not all(worker.supports_trees for worker in workers):  # a chain as long as the tree is deep
        return replace(speculation, num_draft_tokens=requested.tree.depth, tree=None)
    max_nodes = requested.max_draft_tokens
    for worker in workers:
        if worker.num_kv_blocks:
            max_nodes = min(max_nodes, _max_nodes(worker, num_cached))
    tree = requested.tree.reduced_to(requested.max_draft_tokens, max_nodes)
    if tree is None:
        return None
    return replace(speculation, tree=tree)


def _tree_of(request: GenerationRequest, config: GatewayConfig) -> TreeShape | None:
    # The gateway's own tree does not apply to a request that names K or lenience, which needs chains.
    options = request.speculation
    if request.params.beams is not None:
        return None
    if options.tree is not None or not config.tree:
        return options.tree
    if options.num_draft_tokens is not None or request.params.lenience < 1.0:
        return None
    return TreeShape.parse(config.tree)


def _max_nodes(worker: pb.WorkerInfo, num_cached: int) -> int:
    """Assumes that the choice is alone in the cache. One block is reserved because it may have to be copied.

    # 10 blocks of 16 tokens, 100 of them held: 9 * 16 - 100 = 44 nodes
    """
    return max(0, (worker.num_kv_blocks - 1) * worker.kv_block_size - num_cached)
