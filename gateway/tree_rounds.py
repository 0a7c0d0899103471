"""Which rounds of a request draft a tree, and of what shape."""

from __future__ import annotations

from gateway.generation import GenerationRequest
from outrider.v1 import common_pb2 as pb
from outrider.wire.config import GatewayConfig
from outrider.wire.tree_shape import TreeShape


def tree_of(request: GenerationRequest, config: GatewayConfig) -> TreeShape | None:
    """The shape of the request's proposals; None for chains. What is set for all does not contradict who asks for a
    chain's length, or for lenience, which is of chains alone.
    """
    wishes = request.speculation
    if wishes.tree is not None or not config.tree:
        return wishes.tree
    if wishes.num_draft_tokens is not None or wishes.adaptive or request.params.lenience < 1.0:
        return None
    return TreeShape.parse(config.tree)


def both_take_trees(target: pb.WorkerInfo, draft: pb.WorkerInfo) -> bool:
    return target.trees and draft.trees


def room_for_nodes(worker: pb.WorkerInfo, committed_len: int) -> int:
    """In its cache, were the request alone there; a block may have to be copied."""
    return max(0, (worker.num_kv_blocks - 1) * worker.kv_block_size - committed_len)
