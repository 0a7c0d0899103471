"""One line in the log a request, and a span where it is traced."""

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.generation import ChoiceUsage
from gateway.telemetry.request_record import RequestRecords, current_record, request_id_of
from outrider.wire.telemetry.trace import TraceParent


class Recorded:
    """Stands in for a collector; traces everything."""

    def __init__(self) -> None:
        self.added: list[dict[str, Any]] = []

    def begin(self, name: str, parent: TraceParent | None, start: int, **more: Any) -> "Begun":
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


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "gateway.access")
    return caplog


@pytest.mark.parametrize(
    ("told", "expected"), [("abc-1", ("abc-1", "cmpl-abc-1")), ("~" * 128, ("~" * 128, "cmpl-" + "~" * 128))]
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


def test_one_line_logs_the_request_and_its_end(lines: pytest.LogCaptureFixture) -> None:
    with RequestRecords().record("req-1", "chat", None):
        record = current_record()
        record.key, record.model, record.num_prompt_tokens = "alice", "m", 3
        for accepted in (3, 4):
            record.usages.append(
                ChoiceUsage(num_completion_tokens=10, num_rounds=2, num_draft_tokens=8, num_accepted_tokens=accepted)
            )
        record.outcome = "ok"
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
