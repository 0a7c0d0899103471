"""One line in the log a request, and a span where it is traced."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.generation import AnswerUsage, GenerationRequest
from gateway.telemetry.request_record import (
    RequestRecords,
    RoundRecord,
    note_admitted,
    note_answer,
    note_failure,
    note_key,
    note_ok,
    note_round_end,
    request_id_of,
)
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import WorkerFault
from outrider.wire.params import SamplingParams
from outrider.wire.trace import TraceParent

CALLER = TraceParent(0xABC, 0xDEF, True)
TICKET = 4711


class Recorded:
    """Stands in for a collector; traces everything."""

    def __init__(self) -> None:
        self.added: list[dict[str, Any]] = []

    def begin(self, name: str, parent: TraceParent | None, start: int, **more: Any) -> Begun:
        return Begun(self, TraceParent(parent.trace_id if parent else 1, 2, True), name, parent, start)

    def add(self, name: str, parent: TraceParent | None, start: int, end: int, facts: Any, **more: Any) -> None:
        self.added.append({"name": name, "parent": parent, "ns": end - start, "facts": dict(facts)} | more)


@dataclass
class Begun:
    recorded: Recorded
    place: TraceParent
    name: str
    parent: TraceParent | None
    start: int

    def end(self, end: int, facts: Any, error: str | None) -> None:
        self.recorded.add(self.name, self.parent, self.start, end, facts, error=error)


def requests(num_choices: int = 2) -> tuple[GenerationRequest, ...]:
    return tuple(
        GenerationRequest("req-1", "m", (31337, 7, 7), SamplingParams(choice=choice)) for choice in range(num_choices)
    )


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "gateway.access")
    return caplog


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("abc-1", ("abc-1", "cmpl-abc-1")),
        ("~" * 128, ("~" * 128, "cmpl-" + "~" * 128)),
    ],
)
def test_a_caller_may_name_its_request(told: str, expected: tuple[str, str]) -> None:
    assert request_id_of(told, "cmpl") == expected


@pytest.mark.parametrize("told", [None, "", "two words", "line\n", "\x1b[31m", "naïve", "x" * 129])
def test_a_name_that_could_harm_a_log_is_not_taken(told: str | None) -> None:
    request_id, answer_id = request_id_of(told, "cmpl")
    assert request_id == answer_id
    assert request_id.startswith("cmpl-")
    assert len(request_id) == len("cmpl-") + 32
    assert request_id != request_id_of(told, "cmpl")[0]


def test_one_line_says_what_the_request_was_and_how_it_ended(lines: pytest.LogCaptureFixture) -> None:
    with RequestRecords().record("req-1", "chat", None):
        note_key("alice")
        note_admitted(requests())
        for accepted in (3, 4):
            note_answer(
                AnswerUsage(num_completion_tokens=10, num_rounds=2, num_draft_tokens=8, num_accepted_tokens=accepted)
            )
        note_ok()
    (line,) = lines.records
    fields = line.fields  # type: ignore[attr-defined]
    assert line.getMessage().startswith("request req-1: ok in 0.")
    assert line.getMessage().endswith(
        "key alice, model m, 3 prompt and 20 output tokens, 4 rounds, 7 of 16 drafted tokens accepted"
    )
    assert fields["seconds"] < 1
    del fields["seconds"]
    assert {name: value for name, value in fields.items() if value is not None} == {
        "operation": "chat",
        "outcome": "ok",
        "key": "alice",
        "model": "m",
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "completion_tokens": 20,
        "rounds": 4,
        "plain_steps": 0,
        "drafted": 16,
        "accepted": 7,
    }


def test_a_traced_request_is_a_span_below_its_callers_with_its_rounds_below_it() -> None:
    collected = Recorded()
    with RequestRecords(collected).record("req-1", "chat", str(CALLER)):  # type: ignore[arg-type]
        note_admitted(requests(1))
        verdict = tpb.Verdict(token_ids=[31337, 5], num_drafted=4, num_accepted=1)
        note_round_end(RoundRecord(TICKET, time.monotonic() - 0.5, "target-1", 4, "draft-1", verdict))
        note_round_end(RoundRecord(TICKET + 1, time.monotonic(), "target-1"))
        note_failure(WorkerFault("about token 31337"))
    first, second, whole = collected.added
    above = TraceParent(CALLER.trace_id, 2, True)
    assert (first["name"], first["span_id"], first["parent"], first["error"]) == ("round", TICKET, above, None)
    assert 0.5e9 <= first["ns"] < 0.6e9
    assert first["facts"] == {
        "outrider.num_draft_tokens": 4,
        "outrider.target": "target-1",
        "outrider.draft": "draft-1",
        "outrider.num_drafted": 4,
        "outrider.num_accepted": 1,
        "outrider.num_tokens": 2,
    }
    assert second["error"] == "no verdict"
    assert "outrider.draft" not in second["facts"]  # a plain round
    assert (whole["name"], whole["parent"], whole["error"]) == ("request", CALLER, "WorkerFault")
    assert whole["facts"]["gen_ai.usage.input_tokens"] == 3
    assert whole["facts"]["outrider.targets"] == "target-1"
    assert "31337" not in str(collected.added)
