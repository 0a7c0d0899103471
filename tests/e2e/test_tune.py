"""`outrider tune` on the demo pair, with a load so small that its figures mean nothing: only that all is measured."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process_tree import Command
from tests.stack import Stack

SMALL = ("--num-prompts", "1", "--max-tokens", "12", "--max-k", "2", "--repeats", "1")


@contextmanager
def tune(*args: str) -> Iterator[Command]:
    command = Command("-c", "from outrider.cli.main import main; main()", "tune", *SMALL, *args)
    try:
        yield command
    finally:
        command.end()


def study_of(*args: str) -> dict[str, Any]:
    with tune(*args, "--json") as command:
        assert command.wait(110) == 0, command.log()
        (study,) = json.loads(command.out[-1])["studies"]
    return dict(study)


@pytest.mark.slow
def test_a_running_pair_is_measured(stack: Stack, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    study = study_of("--address", stack.grpc, "--temperature", "1", "--png", str(picture))
    assert [point["k"] for point in study["speeds"]] == [0, 1, 2]
    assert all(point["tokens_per_s"] > 0 and point["paper_speedup"] > 0 for point in study["speeds"])
    assert study["speeds"][1]["tokens_per_round"] > 1.0
    assert 0 < study["alpha"] < 1 and study["c"] > 0 and study["step_s"] > 0
    names = [drafter["name"] for drafter in study["drafters"]]
    assert names[0] == "plain"
    for word in ("auto", "ngram", "lookup+model"):
        assert any(word in name for name in names)
    assert study["not_offered"] == {}
    assert study["recommendation"]["name"] in names
    for name, value in study["recommendation"]["gateway_settings"].items():
        assert f"OUTRIDER_GATEWAY_{name.upper()}={value}" in study["start_with"].split()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert stack.target_info().num_slots_in_use == stack.draft_info().num_slots_in_use == 0
