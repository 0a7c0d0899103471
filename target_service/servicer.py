"""Translate protobuf into jobs for the engine, and results into protobuf. No maths. Runs on the gRPC loop's thread."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outrider.engine.worker.jobs import Fault, JobError, invalid
from outrider.engine.worker.worker_service import Respond, WorkerService
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.params import MAX_DRAFT_TOKENS, MAX_WAIT_BUDGET_MS
from outrider.wire.transport.codec import BadTensor, rows_from_proto
from outrider.wire.transport.streams import check_batch
from target_service.jobs import Verdict, VerifyJob
from target_service.tickets import Arrival, DeliveryPart, TicketTable

_ACCEPTABLE = (Arrival.TAKEN, Arrival.COMPLETE, Arrival.LATE)


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves a target's RPCs."""

    def __init__(self, service: WorkerService, tickets: TicketTable, vocab_size: int) -> None:
        self._service = service
        self._tickets = tickets
        self._vocab_size = vocab_size

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:
        return self._service.info()

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.TokenizerFiles:
        return self._service.tokenizer

    async def Control(self, requests: AsyncIterator[tpb.TargetRequestBatch], context: Any) -> None:
        await self._service.control(
            requests,
            context,
            batch_type=tpb.TargetReplyBatch,
            reply_type=tpb.TargetReply,
            take=self._verify,
            to_proto=_reply,
        )

    def _verify(self, owner: int, item: tpb.TargetRequest, respond: Respond) -> None:
        message = item.verify
        error = (
            invalid("num_draft_tokens", message.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
            or invalid("wait_budget_us", message.wait_budget_us, 0, 1000 * MAX_WAIT_BUDGET_MS)
            or invalid("num_own_draft_tokens", message.num_own_draft_tokens, 0, MAX_DRAFT_TOKENS)
            or _drafted_twice(message)
        )
        if error is not None:
            respond(error)
        else:
            self._service.engine.submit(_verify_job(owner, message, respond))

    async def Deliver(
        self, batches: AsyncIterator[tpb.DeliveryBatch], context: grpc.aio.ServicerContext[Any, Any]
    ) -> tpb.DeliverSummary:
        summary = tpb.DeliverSummary()
        async for batch in batches:
            check_batch(len(batch.items))
            for item in batch.items:
                summary.num_deliveries += 1
                if self._deliver(item) not in _ACCEPTABLE:
                    summary.num_refused += 1
        return summary

    def _deliver(self, item: tpb.Delivery) -> Arrival:
        now = time.monotonic()
        try:
            part = self._part(item)
        except BadTensor as error:
            self._tickets.refuse(item.ticket, str(error), len(item.draft_ids), now)
            arrival = Arrival.REFUSED
        else:
            arrival = self._tickets.deliver(part, now)
        if item.start == 0 or arrival not in (Arrival.TAKEN, Arrival.LATE):
            # A verify can go now, with drafts or without; or a proposal is newly parked and its time to live began.
            self._service.engine.submit(None)
        return arrival

    def _part(self, item: tpb.Delivery) -> DeliveryPart:
        """Translate a delivery, checking all that needs no tensor. Raises BadTensor."""
        if item.target_epoch != self._service.epoch:
            raise BadTensor(f"proposal is for target epoch {item.target_epoch}, this is {self._service.epoch}")
        if item.num_draft_tokens > MAX_DRAFT_TOKENS:
            raise BadTensor(f"num_draft_tokens is {item.num_draft_tokens}, must be from 0 to {MAX_DRAFT_TOKENS}")
        if item.start + len(item.draft_ids) > item.num_draft_tokens:
            last = item.start + len(item.draft_ids)
            raise BadTensor(f"part ends at {last}, more than the {item.num_draft_tokens} ids announced")
        draft_ids = tuple(item.draft_ids)
        for token_id in draft_ids:
            if token_id >= self._vocab_size:
                raise BadTensor(f"drafted id {token_id} is outside 0 to {self._vocab_size - 1}")
        if item.parents and len(item.parents) != len(draft_ids):
            raise BadTensor(f"{len(item.parents)} parents for {len(draft_ids)} draft tokens; a tree has one for each")
        parents = tuple(item.parents)
        rows = None
        if item.HasField("distributions"):
            num_rows = len(set(parents)) if parents else len(draft_ids)
            rows = rows_from_proto(item.distributions, num_rows, self._vocab_size)
        size = item.ByteSize()
        return DeliveryPart(
            item.ticket, item.committed_len, item.start, draft_ids, item.num_draft_tokens, rows, size, parents
        )


def _verify_job(owner: int, message: tpb.Verify, respond: Respond) -> VerifyJob:
    return VerifyJob(
        owner=owner,
        slot_id=message.slot,
        base_len=message.base_len,
        committed_ids=tuple(message.committed_ids),
        num_draft_tokens=message.num_draft_tokens,
        ticket=message.ticket,
        wait_budget_s=message.wait_budget_us / 1e6,
        arrived_s=time.monotonic(),
        respond=respond,
        num_own_draft_tokens=message.num_own_draft_tokens,
    )


def _drafted_twice(message: tpb.Verify) -> JobError | None:
    if not (message.num_draft_tokens and message.num_own_draft_tokens):
        return None
    return JobError(
        Fault.INVALID,
        f"num_draft_tokens is {message.num_draft_tokens} and num_own_draft_tokens {message.num_own_draft_tokens}; "
        "a round has one proposal: leave one out",
    )


def _reply(result: Verdict) -> dict[str, tpb.Verdict]:
    timings = result.timings
    verdict = tpb.Verdict(
        committed_len=result.committed_len,
        token_ids=result.token_ids,
        kinds=[kind.value for kind in result.kinds],
        num_drafted=result.num_drafted,
        num_accepted=result.num_accepted,
        finish_reason=pb.FINISH_REASON_UNSPECIFIED if result.finish is None else result.finish.value,
        stop_token_id=result.stop_token_id,
        logprobs=[
            pb.TokenLogprobs(logprob=item.logprob, top_ids=item.top_ids, top_logprobs=item.top_logprobs)
            for item in result.logprobs
        ],
        fallback=tpb.FALLBACK_REASON_UNSPECIFIED if result.fallback is None else result.fallback.value,
        wait_us=_us(timings.wait_s),
        queue_us=_us(timings.queue_s),
        forward_us=_us(timings.forward_s),
        accept_us=_us(timings.accept_s),
        batch_size=timings.batch_size,
        num_batch_tokens=timings.num_batch_tokens,
        num_batch_prompt_tokens=timings.num_batch_prompt_tokens,
        step=timings.step,
        num_cached_tokens=result.num_cached_tokens,
        drafter_has_next=result.drafter_has_next,
    )
    return {"verdict": verdict}


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
