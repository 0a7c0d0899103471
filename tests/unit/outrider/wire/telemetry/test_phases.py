"""Phases of a worker's start in its log."""

import pytest

from outrider.wire.telemetry.phases import phase_in


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "2026-11-28 14:53 INFO target outrider.wire.telemetry.phases: reading weights, 2 MB",
            ("t", "reading weights, 2 MB"),
        ),
        ("(Actor pid=7) 2026 INFO draft outrider.wire.telemetry.phases: [draft-1] self-test", ("draft-1", "self-test")),
        ('(draft-1 pid=7) {"logger": "outrider.wire.telemetry.phases", "message": "[draft-1] b"}', ("draft-1", "b")),
        ('{"logger": "outrider.wire.telemetry.phases", "message"', None),
        ("2026-11-28 14:53:49,442 INFO target outrider.engine: reading weights", None),
    ],
)
def test_a_phase_of_a_worker_is_read_from_either_form_of_its_log(line: str, found: tuple[str, str] | None) -> None:
    assert phase_in("t", line) == found
