"""`outrider report --rehearse`: all of it through real children and services, though its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.process_tree import Command, tree


@pytest.mark.slow
@pytest.mark.timeout(630)
def test_a_rehearsal_runs_every_section(tmp_path: Path) -> None:
    with tree() as left:
        command = Command("-m", "outrider.cli", "report", "--rehearse", "--out", str(tmp_path / "report.md"))
        try:
            assert command.wait(600) == 0, command.log()
        finally:
            command.end()
        assert left.wait_empty(20) == {}
    found = json.loads((tmp_path / "report.json").read_text())
    kinds = {one["title"]: {event["event"] for event in one["events"]} for one in found["sections"]}
    assert {one["state"] for one in found["sections"]} == {"ran"}, kinds
    assert kinds["laws on cpu"] == {"law", "same draws"}
    assert kinds["target on cpu"] == kinds["draft on cpu"] == {"loaded", "bandwidth", "step"}
    assert kinds["split"] == kinds["colocated"] == {"rung"}
    assert "REHEARSAL ON THE CPU" in (tmp_path / "report.md").read_text()
