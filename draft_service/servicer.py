"""Translate protobuf to jobs for the engine, and results to protobuf. No maths. Runs on the gRPC loop's thread."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from draft_service.jobs import Proposed, ProposeJob
from outrider.engine.worker.jobs import Fault, JobError, invalid
from outrider.engine.worker.worker_service import Respond, WorkerService
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.params import MAX_DRAFT_TOKENS, draft_logprobs_of
from outrider.wire.tree_shape import TreeShape

DEFAULT_TOPK = 128
"""Entries of a cut law where a message names none. Doubling it doubles the bytes of each."""


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves a draft's RPCs."""

    def __init__(self, service: WorkerService, vocab_size: int) -> None:
        self._service = service
        self._vocab_size = vocab_size

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:
        return self._service.info()

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.TokenizerFiles:
        return self._service.tokenizer

    async def Control(self, requests: AsyncIterator[dpb.DraftRequestBatch], context: Any) -> None:
        await self._service.control(
            requests,
            context,
            batch_type=dpb.DraftReplyBatch,
            reply_type=dpb.DraftReply,
            take=self._propose,
            to_proto=_reply,
        )

    def _propose(self, owner: int, item: dpb.DraftRequest, respond: Respond) -> None:
        message = item.propose
        least_topk = 1 if message.draft_logprobs == pb.DRAFT_LOGPROBS_TOPK else 0
        error = invalid("num_draft_tokens", message.num_draft_tokens, 1, MAX_DRAFT_TOKENS) or invalid(
            "draft_topk", message.draft_topk, least_topk, self._vocab_size
        )
        if not 0.0 <= message.min_confidence < 1.0:  # NaN is neither
            text = f"min_confidence is {message.min_confidence:g}, must be at least 0 and below 1"
            error = error or JobError(Fault.INVALID, text)
        encoding = tree = None
        try:
            encoding = draft_logprobs_of(message.draft_logprobs, "draft_logprobs")
            tree = TreeShape.from_proto(message.tree) if message.HasField("tree") else None
        except InvalidRequest as refused:
            error = error or JobError(Fault.INVALID, refused.message)
        if error is not None:
            respond(error)
        else:
            job = _propose_job(owner, message, encoding or DraftLogprobs.AUTO, tree, respond)
            self._service.engine.submit(job)


def _propose_job(
    owner: int, message: dpb.Propose, encoding: DraftLogprobs, tree: TreeShape | None, respond: Respond
) -> ProposeJob:
    return ProposeJob(
        owner=owner,
        slot_id=message.slot,
        base_len=message.base_len,
        committed_ids=tuple(message.committed_ids),
        num_draft_tokens=message.num_draft_tokens,
        ticket=message.ticket,
        encoding=encoding,
        topk=message.draft_topk or DEFAULT_TOPK,
        arrived_s=time.monotonic(),
        respond=respond,
        tree=tree,
        min_confidence=message.min_confidence,
    )


def _reply(result: Proposed) -> dict[str, dpb.ProposeReply]:
    reply = dpb.ProposeReply(
        draft_ids=result.draft_ids,
        queue_us=int(result.queue_s * 1e6),
        compute_us=int(result.compute_s * 1e6),
        payload_bytes=result.payload_bytes,
        encoding=result.encoding,
        num_fed_tokens=result.num_fed_tokens,
        num_cached_tokens=result.num_cached_tokens,
    )
    return {"propose": reply}
