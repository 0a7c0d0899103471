"""Translate protobuf into jobs for the engine, and results into protobuf. No maths. Runs on the gRPC loop's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from outrider.engine.speculation.beam import level_to_proto, levels_from_proto
from outrider.engine.speculation.nodes import Nodes, from_proto
from outrider.engine.worker.jobs import Fault, JobError
from outrider.engine.worker.worker_service import Respond, WorkerService
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.errors import InvalidRequest
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.speculation import MAX_DRAFTS
from outrider.wire.transport.codec import BadTensor
from outrider.wire.transport.streams import check_batch
from target_service.feature_stream import FeatureStream
from target_service.heads import Heads
from target_service.jobs import Explanation, ExtendJob, Logprobs, RefusedDelivery, Rejection, Verdict, VerifyJob


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves a target's RPCs."""

    def __init__(
        self,
        service: WorkerService,
        vocab_size: int,
        hand_in: Callable[[Nodes], bool],
        heads: Heads,
        metrics: WorkerMetrics,
    ) -> None:
        """hand_in: leaves what a draft delivered for the engine; False where there is no room."""
        self._service = service
        self._vocab_size = vocab_size
        self._hand_in = hand_in
        self._heads = heads
        self._metrics = metrics

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
            take=self._take,
            to_proto=_reply,
        )

    def _take(self, owner: int, item: tpb.TargetRequest, respond: Respond) -> None:
        if item.WhichOneof("item") == "extend":
            message = item.extend
            self._service.engine.submit(ExtendJob(owner, message.slot, message.ticket, message.until_len))
        else:
            try:
                job = verify_job(owner, item.verify, self._vocab_size, respond)
            except InvalidRequest as error:
                respond(JobError(Fault.INVALID, error.message))
                return
            self._service.engine.submit(job)

    async def Deliver(
        self, batches: AsyncIterator[tpb.DeliveryBatch], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        service, reading = self._service, asyncio.current_task()
        assert reading is not None
        # Before there is a writer: an abort beside the first write would send it twice, and the call would never end.
        await context.send_initial_metadata(())
        rest = (self._heads, service.engine, self._metrics, context.write, reading.cancel)
        stream, summary = FeatureStream(context.peer(), service.epoch, *rest), tpb.DeliverSummary()
        try:
            with service.streams.beside():
                async for batch in batches:
                    check_batch(len(batch.items) + len(batch.asks))
                    for item in batch.items:
                        summary.num_deliveries += 1
                        if not self._deliver(item):
                            summary.num_refused += 1
                    for ask in batch.asks:
                        stream.ask(ask)
                    await stream.wait_read()
                await stream.finish(summary)
        finally:
            await stream.close()

    def _deliver(self, item: tpb.Delivery) -> bool:
        """Hand a delivery on; return False for one that breaks a rule."""
        try:
            if item.target_epoch != self._service.epoch:
                raise BadTensor(f"delivery is for target epoch {item.target_epoch}, this is {self._service.epoch}")
            nodes = from_proto(item, self._vocab_size)
        except BadTensor as error:
            self._service.engine.submit(RefusedDelivery(item.ticket, str(error)))
            return False
        if not self._hand_in(nodes):
            return False
        self._service.engine.submit(None)  # wakes it
        return True


def verify_job(owner: int, message: tpb.Verify, vocab_size: int, respond: Respond) -> VerifyJob:
    """Raises InvalidRequest."""
    tickets = [(each.ticket, each.is_drafted) for each in (message, *message.others)]
    if len({ticket for ticket, _ in tickets}) < len(tickets) or len(tickets) > MAX_DRAFTS:
        raise InvalidRequest(f"a lease has {len(tickets)} tickets, must have 1 to {MAX_DRAFTS}, each once")
    if message.levels and message.others:
        raise InvalidRequest(f"a beam search has {len(tickets)} tickets, must have 1")
    return VerifyJob(
        owner=owner,
        slot_id=message.slot,
        base_len=message.base_len,
        committed_ids=tuple(message.committed_ids),
        ticket=message.ticket,
        until_len=message.until_len,
        is_drafted=message.is_drafted,
        arrived_s=time.monotonic(),
        respond=respond,
        levels=levels_from_proto(message.levels, vocab_size),
        others=tickets[1:],
    )


def _reply(result: Verdict) -> dict[str, tpb.Verdict]:
    timings = result.timings
    verdict = tpb.Verdict(
        committed_len=result.committed_len,
        token_ids=result.token_ids,
        kinds=[kind.value for kind in result.kinds],
        num_drafted=result.num_drafted,
        depth=result.depth,
        num_accepted=result.num_accepted,
        finish_reason=pb.FINISH_REASON_UNSPECIFIED if result.finish is None else result.finish.value,
        stop_token_id=result.stop_token_id,
        logprobs=map(_logprobs, result.logprobs),
        prompt_logprobs=map(_logprobs, result.prompt_logprobs),
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
        drafter=pb.DRAFTER_UNSPECIFIED if result.drafter is None else result.drafter.value,
        hit=result.hit,
        num_wasted=result.num_wasted,
        num_foretold=result.num_foretold,
        num_own_drafted=result.num_own_drafted,
        num_own_accepted=result.num_own_accepted,
        drafts=[
            tpb.DraftOutcome(
                num_drafted=each.num_drafted,
                num_accepted=each.num_accepted,
                is_verified=each.is_verified,
                hit=each.hit,
                is_refused=each.is_refused,
                num_wasted=each.num_wasted,
            )
            for each in result.drafts
        ],
        levels=map(level_to_proto, result.levels),
        hypotheses=[
            tpb.Hypothesis(ids=each.ids, score=each.score, stop_token_id=each.stop_id) for each in result.hypotheses
        ],
        explanation=None if result.explanation is None else _explanation(result.explanation),
    )
    return {"verdict": verdict}


def _explanation(told: Explanation) -> pb.Explanation:
    kept = set(told.accepted)
    return pb.Explanation(
        draft=[
            pb.DraftToken(id=token_id, parent=parent, kind=kind.value, accepted=node in kept)
            for node, (token_id, parent, kind) in enumerate(zip(told.ids, told.parents, told.kinds, strict=True))
        ],
        rejection=None if told.rejection is None else _rejection(told.rejection),
        draft_us=told.draft_us,
    )


def _rejection(told: Rejection) -> pb.Rejection:
    return pb.Rejection(
        parent=told.parent,
        token=pb.RankedToken(id=told.token_id),
        target=[pb.RankedToken(id=token_id, logprob=logprob) for token_id, logprob in told.target],
        draft_law=[pb.RankedToken(id=token_id, logprob=logprob) for token_id, logprob in told.draft_law],
        draft_guesses=[pb.RankedToken(id=token_id) for token_id in told.draft_guesses],
    )


def _logprobs(item: Logprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=item.logprob, top_ids=item.top_ids, top_logprobs=item.top_logprobs, rank=item.rank)


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
