"""Translate protobuf into jobs for the engine, and results into protobuf. Runs on the gRPC loop's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from outrider.engine.speculation.beam import level_to_proto, levels_from_proto
from outrider.engine.speculation.nodes import Delivery, read_delivery
from outrider.engine.worker.jobs import JobError, JobFault
from outrider.engine.worker.worker_service import Respond, WorkerFacts, WorkerService
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.errors import InvalidRequest, Unavailable
from outrider.wire.requests.speculation import MAX_DRAFT_WORKERS
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.codec import BadTensor
from outrider.wire.transport.streams import check_batch
from target_service.features.feature_stream import FeatureStream
from target_service.features.features import FeatureJob, Features
from target_service.features.registered_heads import Heads
from target_service.leases.lease_jobs import ExtendJob, RefusedDelivery, Verdict, VerifyJob


class TargetServicer(WorkerFacts, target_pb2_grpc.TargetServiceServicer):
    """Implements the RPCs of a target worker."""

    def __init__(
        self,
        service: WorkerService,
        vocab_size: int,
        hand_in: Callable[[Delivery], bool],
        heads: Heads,
        metrics: WorkerMetrics,
    ) -> None:
        """Create the servicer. hand_in: function that queues a delivery for the engine thread; it returns False if the
        queue is full.
        """
        super().__init__(service)
        self._vocab_size = vocab_size
        self._hand_in = hand_in
        self._heads = heads
        self._metrics = metrics
        self._probing = asyncio.Lock()

    async def Control(self, requests: AsyncIterator[tpb.TargetRequestBatch], context: Any) -> None:
        await self._service.control(
            requests,
            context,
            batch_type=tpb.TargetReplyBatch,
            reply_type=tpb.TargetReply,
            take=self._handle,
            to_proto=_reply,
        )

    def _handle(self, owner: int, item: tpb.TargetRequest, respond: Respond) -> None:
        if item.WhichOneof("item") == "extend":
            message = item.extend
            self._service.engine.submit(ExtendJob(owner, message.slot, message.ticket, message.lease_end_len))
        else:
            try:
                job = verify_job(owner, item.verify, self._vocab_size, respond)
            except InvalidRequest as error:
                respond(JobError(JobFault.INVALID, error.message))
                return
            self._service.engine.submit(job)

    async def Deliver(
        self, batches: AsyncIterator[tpb.DeliveryBatch], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        service = self._service
        reading = asyncio.current_task()
        assert reading is not None
        # Before there is a writer: an abort beside the first write would send it twice, and the call would never end.
        await context.send_initial_metadata(())
        stream = FeatureStream(
            context.peer(), service.epoch, self._heads, service.engine, self._metrics, context.write, reading.cancel
        )
        summary = tpb.DeliverSummary()
        try:
            with service.streams.track_task():
                async for batch in batches:
                    check_batch(len(batch.items) + len(batch.head_requests))
                    for item in batch.items:
                        summary.num_deliveries += 1
                        if not self._deliver(item):
                            summary.num_refused += 1
                    for ask in batch.head_requests:
                        stream.handle(ask)
                    await stream.wait_read()
                await stream.finish(summary)
        finally:
            await stream.close()

    async def Probe(self, request: tpb.ProbeRequest, context: Any) -> tpb.ProbeReply:
        if request.target_epoch != self._service.epoch:
            raise Unavailable("this is another life of the target", retry_after_s=1.0)
        self._heads.check_probe(len(request.token_ids), request.taps)

        def probe(features: Features) -> tpb.ProbeReply:
            return features.probe(request.token_ids, request.taps)

        async with self._probing:
            return await self._service.engine.call(FeatureJob, probe)

    def _deliver(self, item: tpb.Delivery) -> bool:
        try:
            if item.target_epoch != self._service.epoch:
                raise BadTensor(f"delivery is for target epoch {item.target_epoch}, this is {self._service.epoch}")
            nodes = read_delivery(item, self._vocab_size)
        except BadTensor as error:
            self._service.engine.submit(RefusedDelivery(item.ticket, str(error)))
            return False
        if not self._hand_in(nodes):
            return False
        self._service.engine.submit(None)  # wakes the engine
        return True


def verify_job(owner: int, message: tpb.Verify, vocab_size: int, respond: Respond) -> VerifyJob:
    """Return the job for the engine thread that a Verify message asks for. Raises InvalidRequest if it has no ticket,
    too many, one twice, or wrong beam levels.

    owner: number of the gateway's stream. respond: called with each verdict of the lease, or with an error.
    """
    tickets = dict[int, bool]()
    for draft in message.tickets:
        tickets[draft.ticket] = draft.is_drafted
    num_tickets = len(message.tickets)
    if not 1 <= len(tickets) == num_tickets <= MAX_DRAFT_WORKERS:
        raise InvalidRequest(f"a lease has {num_tickets} tickets, must have 1 to {MAX_DRAFT_WORKERS}, each once")
    if message.levels and num_tickets > 1:
        raise InvalidRequest(f"a beam search has {num_tickets} tickets, must have 1")
    return VerifyJob(
        owner=owner,
        slot_id=message.slot,
        base_len=message.base_len,
        committed_ids=tuple(message.committed_ids),
        tickets=list(tickets.items()),
        lease_end_len=message.lease_end_len,
        arrived_s=time.monotonic(),
        respond=respond,
        levels=levels_from_proto(message.levels, vocab_size),
    )


def _reply(verdict: Verdict) -> dict[str, tpb.Verdict]:
    message = tpb.Verdict(
        committed_len=verdict.committed_len,
        token_ids=verdict.token_ids,
        kinds=[kind.value for kind in verdict.kinds],
        num_drafted=verdict.num_drafted,
        num_accepted=verdict.num_accepted,
        finish_reason=verdict.finish,
        fallback=verdict.fallback,
        drafter=verdict.drafter,
        depth=verdict.depth,
        num_cached_tokens=verdict.num_cached_tokens,
        num_predicted=verdict.num_predicted,
        logprobs=[_logprobs(*reported) for reported in verdict.logprobs],
        prompt_logprobs=[_logprobs(*reported, rank) for reported, rank in verdict.prompt_logprobs],
        levels=map(level_to_proto, verdict.levels),
        explanation=verdict.explanation,
        **verdict.timings._asdict(),
    )
    for outcome in verdict.outcomes:
        message.outcomes.add(**outcome._asdict())
    for hypothesis in verdict.hypotheses:
        message.hypotheses.add(ids=hypothesis.ids, score=hypothesis.score, stop_token_id=hypothesis.stop_id)
    return {"verdict": message}


def _logprobs(logprob: float, top_ids: Sequence[int], top_logprobs: Sequence[float], rank: int = 0) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs, rank=rank)
