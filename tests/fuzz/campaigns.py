"""What is sent, and what must hold afterwards. Each campaign counts its inputs and what they ended in."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deploy.registry import Registry
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import gateway_pb2 as gpb
from outrider.v1 import registry_pb2 as rpb
from outrider.v1 import target_pb2 as tpb
from tests.fuzz.calls import talk
from tests.fuzz.hints import valid_item, valid_part, worker_hints
from tests.fuzz.services import SENTINEL, SETTLE_S, FrontDoor, Worker
from tests.fuzz.values import message_of, mutated, nudged

Code = grpc.StatusCode
CLEAR = {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED}
"""What a caller's rubbish may end in. UNKNOWN, INTERNAL and a deadline that passes are faults of ours."""
BATCH = 16


@dataclass
class Tally:
    num_inputs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def run(campaign: Callable[[Any], None], tally: Tally, num_inputs: int, seed: int) -> Tally:
    """Examples until so many inputs were sent; one that fails is shrunk and shown."""
    started_s = time.monotonic()
    while tally.num_inputs < num_inputs:
        before = tally.num_inputs
        test = given(st.data())(campaign)
        test = settings(
            max_examples=max(1, min(500, (num_inputs - before) // BATCH + 1)),
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )(test)
        hypothesis.seed(seed + before)(test)()
        assert tally.num_inputs > before
    tally.seconds += time.monotonic() - started_s
    return tally


def control(worker: Worker, others: list[str], tally: Tally) -> Callable[[Any], None]:
    """Items in any order on a stream, and a valid request behind them; or bytes that may be no message."""
    request, batch_of = (
        (tpb.TargetRequest, tpb.TargetRequestBatch)
        if worker.role == "target"
        else (dpb.DraftRequest, dpb.DraftRequestBatch)
    )
    hints = worker_hints(worker.epoch, others)

    def campaign(data: Any) -> None:
        draw = data.draw
        messages = []
        anything = draw(st.integers(0, 2)) == 0

        def item() -> Any:
            if anything:
                return message_of(draw, request, hints)
            return nudged(draw, valid_item(draw, request, worker.epoch, others[0]), hints)

        for _ in range(draw(st.integers(1, 3))):
            items = [item() for _ in range(draw(st.integers(1, BATCH)))]
            messages.append(batch_of(items=items).SerializeToString())
            tally.num_inputs += len(items)
        rubbish = draw(st.integers(0, 5)) == 0
        if rubbish:
            messages[-1] = mutated(draw, messages[-1]) if draw(st.booleans()) else draw(st.binary(max_size=40))
        status, details, arrived = talk(
            worker.channel, worker.method("Control"), [*messages, worker.valid()], worker.answered
        )
        tally.ends[f"stream {status.name}"] += 1
        assert status in CLEAR, (status, details)
        assert rubbish or status is Code.OK, (status, details)
        answered = False
        for reply in (reply for raw in arrived for reply in worker.replies(raw)):
            kind = reply.WhichOneof("item")
            if kind == "error":
                kind = f"error {pb.WorkerErrorCode.Name(reply.error.code).removeprefix('WORKER_ERROR_CODE_')}"
                assert reply.error.code != pb.WORKER_ERROR_CODE_INTERNAL, reply
            tally.ends[f"reply {kind}"] += 1
            answered |= reply.id == SENTINEL and kind in ("verdict", "propose")
        assert answered or status is not Code.OK, "the valid request was not served"
        if rubbish:
            worker.check_alive()
        worker.check_empty()

    return campaign


def deliver(target: Worker, tally: Tally) -> Callable[[Any], None]:
    """Parts of proposals under tickets that a stream beside them waits for."""
    hints = worker_hints(target.epoch, [target.address])

    def campaign(data: Any) -> None:
        draw = data.draw
        items = [valid_item(draw, tpb.TargetRequest, target.epoch, "") for _ in range(6)]
        anything = draw(st.integers(0, 2)) == 0

        def part() -> tpb.Delivery:
            return (
                message_of(draw, tpb.Delivery, hints)
                if anything
                else nudged(draw, valid_part(draw, target.epoch), hints)
            )

        parts = [part() for _ in range(draw(st.integers(1, BATCH)))]
        raw = tpb.DeliveryBatch(items=parts).SerializeToString()
        rubbish = draw(st.integers(0, 5)) == 0
        if rubbish:
            raw = mutated(draw, raw)
        tally.num_inputs += len(items) + len(parts)
        waiting = tpb.TargetRequestBatch(items=items).SerializeToString()
        for messages in ([raw], [waiting, target.valid()], [raw]):
            is_control = len(messages) == 2
            method, until = ("Control", target.answered) if is_control else ("Deliver", None)
            status, details, arrived = talk(target.channel, target.method(method), messages, until)
            tally.ends[f"{method} {status.name}"] += 1
            assert status in CLEAR and (rubbish or status is Code.OK), (status, details)
            if method == "Deliver" and status is Code.OK:
                summary = tpb.DeliverSummary.FromString(arrived[0])
                tally.ends["part refused"] += summary.num_refused
                tally.ends["part taken"] += summary.num_deliveries - summary.num_refused

    return campaign


def generate(front: FrontDoor, tally: Tally) -> Callable[[Any], None]:
    """One message a call: of the right form with values near every bound, changed bytes, and any bytes."""
    method = "/outrider.v1.GenerationService/Generate"
    hints = {
        "GenerateRequest.model": st.sampled_from(["", "", "", "models/demo/target", "é" * 100]),
        "GenerateRequest.prompt": st.sampled_from(["x", "", "é\0", "def f():" * 400]),
        "TokenSequence.ids": st.lists(st.sampled_from([5, 6, 0, 4095, 4096, 2**32 - 1]), max_size=5),
        "ChatMessage.role": st.sampled_from(["user", "system", "assistant", "wizard", ""]),
        "GenerateRequest.num_choices": st.sampled_from([0, 1, 2, 128, 129, 2**32 - 1]),
    }

    def campaign(data: Any) -> None:
        draw = data.draw
        for _ in range(4):
            how = draw(st.integers(0, 6))
            valid = gpb.GenerateRequest(prompt="x", params=pb.SamplingParams(max_tokens=9))
            message = nudged(draw, valid, hints) if how > 3 else message_of(draw, gpb.GenerateRequest, hints)
            raw = message.SerializeToString()
            raw = mutated(draw, raw) if how == 0 else draw(st.binary(max_size=60)) if how == 1 else raw
            tally.num_inputs += 1
            status, details, _ = talk(front.channel, method, [raw])
            tally.ends[status.name] += 1
            assert status in CLEAR, (status, details)
            assert status is Code.OK or details, "an error says what was wrong"
        status, details, arrived = talk(front.channel, method, [gpb.GenerateRequest(prompt="x").SerializeToString()])
        assert status is Code.OK and arrived, (status, details)
        front.check_empty()
        del front.generator.requests[:]

    return campaign


def join(registry: Registry, channel: grpc.Channel, tally: Tally) -> Callable[[Any], None]:
    """Reports of gateways."""
    method = "/outrider.v1.RegistryService/Join"

    def campaign(data: Any) -> None:
        draw = data.draw
        reports = [message_of(draw, rpb.GatewayReport, {}).SerializeToString() for _ in range(BATCH)]
        rubbish = draw(st.integers(0, 3)) == 0
        if rubbish:
            reports[-1] = mutated(draw, reports[-1]) if draw(st.booleans()) else draw(st.binary(max_size=40))
        tally.num_inputs += len(reports)
        status, details, arrived = talk(channel, method, reports, until=lambda _: True)
        tally.ends[status.name] += 1
        assert status in CLEAR and (rubbish or status is Code.OK), (status, details)
        assert arrived or status is not Code.OK
        assert all(rpb.Membership.FromString(raw).members for raw in arrived)
        give_up = time.monotonic() + SETTLE_S
        while registry.reports():
            assert time.monotonic() < give_up, "a gateway that left is still counted"
            time.sleep(0.001)

    return campaign
