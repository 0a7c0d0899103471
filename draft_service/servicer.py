"""Protobuf in, jobs to the engine, results out as protobuf. No maths. Runs on the gRPC loop's thread."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from draft_service.jobs import Encoding, Proposed, ProposeJob
from outrider.engine.engine_thread import EngineThread
from outrider.engine.jobs import Fault, JobError, Opened, OwnerGone
from outrider.engine.translate import close_job, error_to_proto, no_item, open_job, stale_epoch, truncate_job
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc
from outrider.wire.control import ControlStreams

MAX_DRAFT_TOKENS = 64


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    def __init__(
        self,
        engine: EngineThread,
        info: Callable[[], pb.WorkerInfo],
        tokenizer: pb.TokenizerFiles,
        epoch: int,
        vocab_size: int,
    ) -> None:
        self._engine = engine
        self._info = info
        self._tokenizer = tokenizer
        self._epoch = epoch
        self._vocab_size = vocab_size
        self.streams = ControlStreams()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:
        return self._info()

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.TokenizerFiles:
        return self._tokenizer

    async def Control(self, requests: AsyncIterator[dpb.DraftRequestBatch], context: Any) -> None:
        await self.streams.serve(
            requests,
            context,
            make_batch=lambda items: dpb.DraftReplyBatch(items=items),
            dispatch=self._dispatch,
            gone=lambda owner: self._engine.submit(OwnerGone(owner)),
        )

    def _dispatch(self, owner: int, item: dpb.DraftRequest, put: Callable[[dpb.DraftReply], None]) -> None:
        def respond(result: Opened | Proposed | JobError) -> None:
            put(_reply(item.id, result))

        kind = item.WhichOneof("item")
        if item.epoch != self._epoch:
            if item.id:
                respond(stale_epoch(item.epoch, self._epoch))
        elif kind == "open":
            self._engine.submit(open_job(owner, item.open, respond))
        elif kind == "propose":
            self._propose(owner, item.propose, respond)
        elif kind == "truncate":
            self._engine.submit(truncate_job(owner, item.truncate))
        elif kind == "close":
            self._engine.submit(close_job(owner, item.close))
        elif item.id:
            respond(no_item())

    def _propose(self, owner: int, message: dpb.Propose, respond: Callable[[Any], None]) -> None:
        if not 1 <= message.num_draft_tokens <= MAX_DRAFT_TOKENS:
            text = f"num_draft_tokens is {message.num_draft_tokens}, must be from 1 to {MAX_DRAFT_TOKENS}"
            respond(JobError(Fault.INVALID, text))
            return
        topk = message.draft_logprobs == pb.DRAFT_LOGPROBS_TOPK
        if not (1 if topk else 0) <= message.draft_topk <= self._vocab_size:
            text = f"draft_topk is {message.draft_topk}, must be from 1 to {self._vocab_size}"
            respond(JobError(Fault.INVALID, text))
            return
        self._engine.submit(_propose_job(owner, message, respond))


def _propose_job(owner: int, message: dpb.Propose, respond: Callable[[Any], None]) -> ProposeJob:
    encodings = {encoding.value: encoding for encoding in Encoding}
    return ProposeJob(
        owner=owner,
        slot_id=message.slot,
        base_len=message.base_len,
        committed_ids=tuple(message.committed_ids),
        num_draft_tokens=message.num_draft_tokens,
        ticket=message.ticket,
        encoding=encodings.get(message.draft_logprobs, Encoding.AUTO),
        topk=message.draft_topk or 128,
        arrived_s=time.monotonic(),
        respond=respond,
    )


def _reply(message_id: int, result: Opened | Proposed | JobError) -> dpb.DraftReply:
    if isinstance(result, JobError):
        return dpb.DraftReply(id=message_id, error=error_to_proto(result))
    if isinstance(result, Opened):
        return dpb.DraftReply(id=message_id, open=pb.OpenReply(committed_len=result.committed_len))
    reply = dpb.ProposeReply(
        draft_ids=result.draft_ids,
        queue_us=int(result.queue_s * 1e6),
        compute_us=int(result.compute_s * 1e6),
        payload_bytes=result.payload_bytes,
        encoding=result.encoding,
        num_fed_tokens=result.num_fed_tokens,
    )
    return dpb.DraftReply(id=message_id, propose=reply)
