"""Spans of a worker: which rounds have them, whose children they are, what they say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.engine.worker.worker_service import SlotSpans
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.trace import TraceParent

REQUEST = TraceParent(0xABC, 0xDEF, True)
TICKET = 77


@dataclass
class Recorded:
    """Stands in for a collector."""

    added: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, parent: TraceParent, start: int, end: int, facts: Any, **more: Any) -> TraceParent:
        place = TraceParent(parent.trace_id, 1000 + len(self.added), True)
        told = {"name": name, "place": place, "parent": parent, "start": start, "end": end, "facts": dict(facts)}
        self.added.append(told | more)
        return place


def opened(recorded: Recorded, traceparent: str, owner: int = 1) -> SlotSpans:
    spans = SlotSpans(recorded)  # type: ignore[arg-type]
    message = pb.OpenSlot(slot=5, committed_ids=[1, 2], num_prompt_tokens=2, traceparent=traceparent)
    assert spans.asked(owner, tpb.TargetRequest(open=message)) is None
    return spans


def verify(slot: int = 5) -> tpb.TargetRequest:
    return tpb.TargetRequest(verify=tpb.Verify(slot=slot, committed_ids=[31337], num_draft_tokens=4, ticket=TICKET))


def test_a_verify_is_a_child_of_its_round_with_its_phases_one_after_the_other() -> None:
    recorded = Recorded()
    told = opened(recorded, str(REQUEST)).asked(1, verify())
    assert told is not None
    verdict = tpb.Verdict(
        token_ids=[31337, 4], num_drafted=4, num_accepted=1, wait_us=300, forward_us=1000, accept_us=50, batch_size=3
    )
    told(tpb.TargetReply(verdict=verdict))
    whole, *phases = recorded.added
    above = TraceParent(REQUEST.trace_id, TICKET, True)
    assert (whole["name"], whole["parent"], whole["server"]) == ("verify", above, True)
    assert whole["facts"] == {
        "outrider.slot": 5,
        "outrider.num_draft_tokens": 4,
        "outrider.num_drafted": 4,
        "outrider.num_accepted": 1,
        "outrider.batch_size": 3,
        "outrider.num_cached_tokens": 0,
    }
    assert [phase["name"] for phase in phases] == ["wait", "forward", "accept"]  # it did not queue
    assert {phase["parent"] for phase in phases} == {whole["place"]}
    assert [phase["end"] - phase["start"] for phase in phases] == [300_000, 1_000_000, 50_000]
    assert [whole["start"], *(phase["end"] for phase in phases)] == [
        *(phase["start"] for phase in phases),
        whole["end"],
    ]
    assert "31337" not in str(recorded.added)


def test_only_slots_that_are_sampled_are_traced_and_only_while_they_are_open() -> None:
    recorded = Recorded()
    for traceparent in ("", "00-nonsense", str(TraceParent(1, 2, False))):
        assert opened(recorded, traceparent).asked(1, verify()) is None
    spans = opened(recorded, str(REQUEST))
    assert spans.asked(2, verify()) is None  # another gateway's slot of that number
    assert spans.asked(1, verify(slot=6)) is None
    spans.asked(1, tpb.TargetRequest(close=pb.CloseSlot(slot=5)))
    assert spans.asked(1, verify()) is None
    spans = opened(recorded, str(REQUEST))
    spans.gone(2)
    assert spans.asked(1, verify()) is not None
    spans.gone(1)
    assert spans.asked(1, verify()) is None
    assert not recorded.added
