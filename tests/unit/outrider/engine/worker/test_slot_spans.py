"""The spans of a worker's steps, as a collector gets them."""

from collections.abc import Callable

from outrider.engine.worker.slot_spans import SlotSpans
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.telemetry.trace import Spans, round_span_id
from tests.otlp_collector import Span, collecting

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"
VERIFY = tpb.TargetRequest(verify=tpb.Verify(slot=5, tickets=[tpb.DraftTicket(ticket=77)]))


def opening(traceparent: str) -> tpb.TargetRequest:
    return tpb.TargetRequest(open=pb.OpenSlot(slot=5, traceparent=traceparent))


def collected(play: Callable[[SlotSpans], None], num_spans: int) -> dict[str, Span]:
    """Return by name the spans that are sent for what `play` does."""
    with collecting() as (collector, endpoint, _):
        spans = Spans(endpoint, "target")
        play(SlotSpans(spans))
        spans.close()
        found = collector.wait(lambda found: len(found) == num_spans)
    return {span.name: span for span in found}


def test_a_verdict_is_a_span_of_its_round_with_a_child_for_each_phase_that_took_time() -> None:
    def play(slots: SlotSpans) -> None:
        slots.begin_item(1, opening(SAMPLED))
        answer = slots.begin_item(1, VERIFY)
        assert answer is not None
        verdict = tpb.Verdict(committed_len=9, queue_us=10, forward_us=300, accept_us=40, num_drafted=3, batch_size=2)
        answer(tpb.TargetReply(verdict=verdict))

    found = collected(play, 4)
    assert found.keys() == {"verify", "queue", "forward", "accept"}, "it did not wait"
    step = found["verify"]
    assert (step.trace_id, step.parent_id) == (TRACE_ID, f"{round_span_id(77, 9):016x}")
    assert step.end_ns - step.start_ns == 350_000
    assert (step.attributes["outrider.num_drafted"], step.attributes["outrider.batch_size"]) == (3, 2)
    forward = found["forward"]
    assert (forward.parent_id, forward.start_ns - step.start_ns) == (step.span_id, 10_000)
    assert found["accept"].end_ns == step.end_ns


def test_an_error_is_a_span_of_the_request_that_names_the_code() -> None:
    def play(slots: SlotSpans) -> None:
        slots.begin_item(1, opening(SAMPLED))
        answer = slots.begin_item(1, VERIFY)
        assert answer is not None
        answer(tpb.TargetReply(error=pb.WorkerError(code=pb.WORKER_ERROR_CODE_BEHIND, message="a secret")))

    (step,) = collected(play, 1).values()
    assert (step.parent_id, step.is_error, step.attributes) == (PARENT_ID, True, {"outrider.slot": 5})


def test_slots_that_are_not_sampled_or_not_open_have_no_spans() -> None:
    def play(slots: SlotSpans) -> None:
        for traceparent in ("", "nonsense", SAMPLED[:-1] + "0"):
            slots.begin_item(1, opening(SAMPLED))
            slots.begin_item(1, opening(traceparent))  # the same slot, opened again
            assert slots.begin_item(1, VERIFY) is None
        slots.begin_item(1, opening(SAMPLED))
        assert slots.begin_item(2, VERIFY) is None, "another stream's slot"
        assert slots.begin_item(1, tpb.TargetRequest(verify=tpb.Verify(slot=5))) is None, "a verify without a ticket"
        slots.begin_item(1, tpb.TargetRequest(close=pb.CloseSlot(slot=5)))
        assert slots.begin_item(1, VERIFY) is None
        slots.begin_item(1, opening(SAMPLED))
        slots.close_stream(1)
        assert slots.begin_item(1, VERIFY) is None

    assert collected(play, 0) == {}
