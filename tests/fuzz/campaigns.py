"""What is sent, and what must hold afterwards. Each campaign counts its inputs and what they ended in.

An input is altered when its bytes are not those of a valid message in its place. That one is accepted nonetheless is no
fault: many a changed field leaves a message valid.
"""

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import grpc
import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deploy.registry import Registry
from gateway.api.http_io import is_anthropic_path
from gateway.api.schemas.answers.messages import MessageError
from gateway.api.schemas.answers.server import Error
from gateway.output_format import OutputFormat, one_output
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import gateway_pb2 as gpb
from outrider.v1 import registry_pb2 as rpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest
from outrider.wire.protocol import PROTOCOL
from outrider.wire.requests.params import ANY_VOCABULARY, SamplingParams
from tests.fuzz.bodies import PLAYED, VALID, changed, names_of
from tests.fuzz.calls import DEADLINE_S, hold, talk
from tests.fuzz.hints import (
    LAST_DIGEST,
    SENTINEL,
    UNDISTURBED,
    last_asks,
    leases,
    registration,
    sound_part,
    structured_hints,
    valid_ask,
    valid_item,
    valid_part,
    valid_probe,
    worker_hints,
)
from tests.fuzz.services import SETTLE_S, FrontDoor, HttpDoor, Worker
from tests.fuzz.values import message_of, mutated, nudged
from tests.service.test_recorded_requests import READERS, read
from tests.waiting import wait_until_none

Code = grpc.StatusCode
CLEAR = {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED}
"""What a caller's rubbish may end in. UNKNOWN, INTERNAL and a deadline that passes are faults of ours."""
CLEAR_STATUSES = {200, 400, 404, 413}
"""The same over HTTP. Nothing else is asked for, so that 429 would say that something is held."""
LAST_EVENT = {"/v1/messages": "message_stop", "/v1/responses": r"response\.(completed|incomplete)"}
"""What a stream ends with that does not end with [DONE]."""
BATCH = 16


@dataclass
class Tally:
    num_inputs: int = 0
    num_altered: int = 0
    num_refused: int = 0
    """Inputs that were answered with an error."""
    num_accepted: int = 0
    """Inputs that were answered otherwise. Some have no answer, and what follows rubbish on a stream is not read."""
    ends: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest_s: float = 0.0
    """Of the calls."""

    def talk(self, *arguments: Any) -> tuple[Code, str, list[bytes]]:
        began_s = time.monotonic()
        status, details, arrived = talk(*arguments)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        assert status in CLEAR, (arguments[1], status, details)
        return status, details, arrived

    def changed(self, message: bytes, valid: bytes | None) -> None:
        """Counts an input; None: nothing valid was there to begin with."""
        self.num_inputs += 1
        self.num_altered += message != valid


def run(
    campaign: Callable[[Any], None], tally: Tally, num_altered: int, seed: int, wanted: Collection[str] = ()
) -> Tally:
    """Examples until so many altered inputs were sent, and until each of the ends in `wanted` was met, which takes ten
    times as many at most: what a seed draws depends on the modules that are imported. One that fails is shrunk.
    """
    started_s = time.monotonic()
    while tally.num_altered < num_altered or not all(tally.ends[end] for end in wanted):
        before = tally.num_altered
        assert before < 10 * num_altered, f"of {sorted(wanted)} only {tally.ends} in {before} inputs"
        test = given(st.data())(campaign)
        test = settings(
            max_examples=max(2, min(500, (num_altered - before) // BATCH + 1)),  # the first is the simplest, always
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )(test)
        hypothesis.seed(seed + before)(test)()
        assert tally.num_altered > before
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
            valid = None if anything else valid_item(draw, request, worker.epoch, others[0])
            raw = None if valid is None else valid.SerializeToString()
            made = message_of(draw, request, hints) if valid is None else nudged(draw, valid, hints)
            tally.changed(made.SerializeToString(), raw)
            return made

        for _ in range(draw(st.integers(1, 3))):
            items = [item() for _ in range(draw(st.integers(1, BATCH)))]
            messages.append(batch_of(items=items).SerializeToString())
        rubbish = draw(st.integers(0, 5)) == 0
        if rubbish:
            valid = messages[-1]
            messages[-1] = mutated(draw, valid) if draw(st.booleans()) else draw(st.binary(max_size=40))
            tally.changed(messages[-1], valid)
        status, details, arrived = tally.talk(
            worker.channel, worker.method("Control"), [*messages, worker.valid()], worker.answered
        )
        tally.ends[f"stream {status.name}"] += 1
        tally.num_refused += status is not Code.OK
        assert rubbish or status is Code.OK, (status, details)
        answered = False
        for reply in (reply for raw in arrived for reply in worker.replies(raw)):
            kind = reply.WhichOneof("item")
            if kind == "error":
                kind = f"error {pb.WorkerErrorCode.Name(reply.error.code).removeprefix('WORKER_ERROR_CODE_')}"
                assert reply.error.code != pb.WORKER_ERROR_CODE_INTERNAL, reply
            tally.ends[f"reply {kind}"] += 1
            if reply.id < SENTINEL - 1:
                tally.num_refused += kind.startswith("error")
                tally.num_accepted += not kind.startswith("error")
            answered |= reply.id == SENTINEL and kind in ("verdict", "open")
        assert answered or status is not Code.OK, "the valid request was not served"
        if rubbish:
            worker.check_alive()
        worker.check_empty()

    return campaign


def once_ready(rest: bytes, served: Callable[[], object] = lambda: None) -> Callable[[bytes], bool | bytes]:
    """Sends the rest when a head is ready. Ends when the head of LAST_DIGEST is refused, and `served` has returned."""
    left = [rest]

    def until(message: bytes) -> bool | bytes:
        batch = tpb.FeatureBatch.FromString(message)
        if any(reply.digest == LAST_DIGEST for reply in batch.head_replies):
            served()
            return True
        return bool(left) and any(reply.state == tpb.HEAD_STATE_READY for reply in batch.head_replies) and left.pop()

    return until


def deliver(target: Worker, tally: Tally) -> Callable[[Any], None]:
    """Deliveries under tickets of nobody, and then of the leases on a stream beside them, which then go on with those
    and with sound ones behind them.
    """
    hints = worker_hints(target.epoch, [target.address])
    extends = [
        tpb.TargetRequest(epoch=target.epoch, extend=tpb.Extend(slot=slot, ticket=ticket, lease_end_len=12))
        for slot, ticket in (*itertools.product(range(1, 4), range(1, 5)), (UNDISTURBED, UNDISTURBED))
    ]
    sound_parts = [sound_part(ticket, target.epoch) for ticket in (1, 2, 3, UNDISTURBED)]
    sound = tpb.DeliveryBatch(items=sound_parts).SerializeToString()
    registered = tpb.DeliveryBatch(head_requests=registration(target.epoch)).SerializeToString()
    held = hold(target.channel, target.method("Deliver"), registered, once_ready(b""))  # rows are made all the while
    go_on = tpb.TargetRequestBatch(items=extends).SerializeToString() + target.valid()  # joined, they are one batch

    def campaign(data: Any) -> None:
        draw = data.draw
        probed = nudged(draw, valid_probe(draw, target.epoch), hints)

        def probe() -> None:
            """Call behind what was asked for on the stream, which is served by then."""
            call = target.channel.unary_unary(target.method("Probe"))  # type: ignore[call-arg]
            try:
                call(probed.SerializeToString(), timeout=DEADLINE_S)
                tally.ends["probes"] += 1
            except grpc.RpcError as error:
                assert error.code() in {*CLEAR, Code.UNAVAILABLE}, error  # type: ignore[attr-defined]

        items = [
            *leases(draw, target.epoch),
            *(valid_item(draw, tpb.TargetRequest, target.epoch, "") for _ in range(3)),
        ]
        anything = draw(st.integers(0, 2)) == 0

        def part() -> tpb.Delivery:
            valid = None if anything else valid_part(draw, target.epoch)
            raw = None if valid is None else valid.SerializeToString()
            made = message_of(draw, tpb.Delivery, hints) if valid is None else nudged(draw, valid, hints)
            tally.changed(made.SerializeToString(), raw)
            return made

        def ask() -> tpb.HeadRequest:
            valid = None if anything else valid_ask(draw, target.epoch)
            raw = None if valid is None else valid.SerializeToString()
            made = message_of(draw, tpb.HeadRequest, hints) if valid is None else nudged(draw, valid, hints)
            tally.changed(made.SerializeToString(), raw)
            return made

        parts = [part() for _ in range(draw(st.integers(1, BATCH)))]
        asks = [ask() for _ in range(draw(st.integers(0, BATCH // 2)))]
        if draw(st.booleans()):
            asks = [*registration(target.epoch), *asks]
        raw = tpb.DeliveryBatch(items=parts, head_requests=asks).SerializeToString()
        rubbish = draw(st.integers(0, 5)) == 0
        if rubbish:
            valid = raw
            raw = mutated(draw, valid)
            tally.changed(raw, valid)

        has_head = not rubbish and draw(st.booleans())
        last = tpb.DeliveryBatch(head_requests=last_asks(target.epoch)).SerializeToString()

        def deliver_raw(*, is_counted: bool) -> None:
            messages, until = ([registered], once_ready(raw + last, probe)) if has_head else ([raw], None)
            status, details, arrived = tally.talk(target.channel, target.method("Deliver"), messages, until)
            tally.ends[f"Deliver {status.name}"] += 1
            assert rubbish or status is Code.OK, (status, details)
            batches = [tpb.FeatureBatch.FromString(message) for message in arrived]
            summary = batches[-1].summary if status is Code.OK else tpb.DeliverSummary()
            assert all(not batch.HasField("summary") for batch in batches[:-1])
            for batch in batches:
                tally.ends["rows"] += len(batch.chunks)
                for reply in batch.head_replies:
                    tally.ends[tpb.HeadState.Name(reply.state).removeprefix("HEAD_STATE_").lower()] += 1
                    assert reply.reason or reply.state != tpb.HEAD_STATE_REFUSED, "a refusal says why"
            tally.ends["part refused"] += summary.num_refused
            tally.ends["part taken"] += summary.num_deliveries - summary.num_refused
            if is_counted:
                tally.num_refused += summary.num_refused + (status is not Code.OK)
                tally.num_accepted += summary.num_deliveries - summary.num_refused

        has_delivered = False

        def until(message: bytes) -> bool | bytes:
            nonlocal has_delivered
            verdicts = [reply for reply in target.replies(message) if reply.HasField("verdict")]
            if not any(reply.id == SENTINEL for reply in verdicts):
                return False
            if has_delivered:
                return True
            has_delivered = True
            deliver_raw(is_counted=False)
            status, details, _ = talk(target.channel, target.method("Deliver"), [sound])
            assert status is Code.OK, (status, details)
            return go_on

        deliver_raw(is_counted=True)
        waiting = tpb.TargetRequestBatch(items=items).SerializeToString()
        status, details, arrived = tally.talk(
            target.channel, target.method("Control"), [waiting, target.valid()], until
        )
        tally.ends[f"Control {status.name}"] += 1
        assert status is Code.OK and has_delivered, (status, details)
        replies = [reply for message in arrived for reply in target.replies(message)]
        tally.ends["drafts verified"] += sum(reply.verdict.num_drafted for reply in replies)
        for reply in replies:
            assert reply.error.code != pb.WORKER_ERROR_CODE_INTERNAL, reply
        assert held.is_active()

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
        **structured_hints(),
    }

    def campaign(data: Any) -> None:
        draw = data.draw
        for _ in range(4):
            how = draw(st.integers(0, 6))
            valid = gpb.GenerateRequest(prompt="x", params=pb.SamplingParams(max_tokens=9))
            if draw(st.booleans()):
                valid.structured_outputs.json = '{"type": "object", "properties": {"a": {"enum": [1, "b"]}}}'
            unaltered = valid.SerializeToString()
            message = nudged(draw, valid, hints) if how > 3 else message_of(draw, gpb.GenerateRequest, hints)
            raw = message.SerializeToString()
            raw = mutated(draw, raw) if how == 0 else draw(st.binary(max_size=60)) if how == 1 else raw
            tally.changed(raw, unaltered)
            status, details, _ = tally.talk(front.channel, method, [raw])
            tally.ends[status.name] += 1
            tally.num_refused += status is not Code.OK
            tally.num_accepted += status is Code.OK
            assert status is Code.OK or details, "an error says what was wrong"
        status, details, arrived = talk(front.channel, method, [gpb.GenerateRequest(prompt="x").SerializeToString()])
        assert status is Code.OK and arrived, (status, details)
        front.check_empty()
        del front.generator.requests[:]

    return campaign


def bodies(door: HttpDoor, tally: Tally) -> Callable[[Any], None]:
    """Bodies of every endpoint that reads one, and a valid one behind them. Answers, events and errors have to be in
    the endpoint's own form.
    """
    names = {path: names_of(_fields_of(door.document, path)) for path in VALID}
    valid_of = {path: st.sampled_from(texts) for path, texts in VALID.items()}

    def campaign(data: Any) -> None:
        draw = data.draw
        door.play(*draw(st.sampled_from(PLAYED)))
        for _ in range(BATCH // 2):
            path = draw(st.sampled_from(sorted(VALID)))
            valid = draw(valid_of[path])
            raw = changed(draw, valid, names[path])
            tally.changed(raw, valid.encode())
            began_s = time.monotonic()
            status, kind, told = door.post(path, raw)
            tally.slowest_s = max(tally.slowest_s, time.monotonic() - began_s)
            tally.ends[f"{path} {status}"] += 1
            tally.num_refused += status != 200
            tally.num_accepted += status == 200
            assert status in CLEAR_STATUSES, (path, status, told, raw)
            _check_form(path, status, kind, told)
        status, kind, told = door.post(path, valid.encode())
        assert status == 200, (path, status, told)
        _check_form(path, status, kind, told)
        door.check_empty()
        del door.generator.requests[:]

    return campaign


def _fields_of(document: Any, path: str) -> list[str]:
    """Return the names of the fields of a body."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return sorted(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"])


def _check_form(path: str, status: int, kind: str, told: bytes) -> None:
    """Whether an answer is what the protocol of its endpoint knows."""
    if status != 200:
        assert kind == "application/json"
        error = MessageError if is_anthropic_path(path) else Error
        assert error.model_validate_json(told).error.message, "an error says what was wrong"
        return
    whole, event = READERS[path]
    if kind == "application/json":
        read(whole, json.loads(told))
        return
    assert kind == "text/event-stream"
    events = [line.removeprefix("data: ") for line in told.decode().split("\n") if line.startswith("data: ")]
    if path not in LAST_EVENT:
        assert events.pop() == "[DONE]"
    for each in events:
        read(event, json.loads(each))
    assert re.fullmatch(LAST_EVENT.get(path, ""), json.loads(events[-1]).get("type", "")), events[-1]


def grammars(check: Callable[[OutputFormat], str], tally: Tally) -> Callable[[Any], None]:
    """What an answer has to be, without the way there: each ends in a grammar that workers take or in a refusal that
    names its place.
    """
    fields = {
        "json": structured_hints()["StructuredOutputs.json"],
        "regex": structured_hints()["StructuredOutputs.regex"],
        "choice": structured_hints()["Choices.texts"],
        "grammar": structured_hints()["StructuredOutputs.grammar"],
    }

    def campaign(data: Any) -> None:
        for _ in range(BATCH):
            kind = data.draw(st.sampled_from(sorted(fields)))
            output = one_output({kind: data.draw(fields[kind])}, strict=data.draw(st.integers(0, 9)) == 0)
            tally.changed(b"", None)
            began_s = time.monotonic()
            try:
                grammar = check(output)
                tally.num_accepted += 1
                tally.ends[f"{kind} OK"] += 1
            except InvalidRequest as refused:
                grammar = None
                tally.num_refused += 1
                tally.ends[f"{kind} refused"] += 1
                assert refused.param is not None and refused.param.startswith(output.param), refused.param
            tally.slowest_s = max(tally.slowest_s, time.monotonic() - began_s)
            if grammar is not None:
                assert not SamplingParams(max_tokens=1, grammar=grammar).check(ANY_VOCABULARY)

    return campaign


def join(registry: Registry, channel: grpc.Channel, tally: Tally) -> Callable[[Any], None]:
    """Reports of gateways."""
    method = "/outrider.v1.RegistryService/Join"

    def campaign(data: Any) -> None:
        draw = data.draw
        messages = [message_of(draw, rpb.GatewayReport, {}) for _ in range(BATCH)]
        for message in messages:
            message.protocol = PROTOCOL
        reports = [message.SerializeToString() for message in messages]
        rubbish = draw(st.integers(0, 3)) == 0
        if rubbish:
            reports[-1] = mutated(draw, reports[-1]) if draw(st.booleans()) else draw(st.binary(max_size=40))
        for raw in reports:
            tally.changed(raw, None)
        status, details, arrived = tally.talk(channel, method, reports, lambda _: True)
        tally.ends[status.name] += 1
        tally.num_refused += status is not Code.OK
        tally.num_accepted += len(reports) - (status is not Code.OK)
        assert rubbish or status is Code.OK, (status, details)
        assert arrived or status is not Code.OK
        assert all(rpb.WorkerList.FromString(raw).workers for raw in arrived)
        wait_until_none(registry.reports, SETTLE_S)  # a gateway that left is not counted

    return campaign
