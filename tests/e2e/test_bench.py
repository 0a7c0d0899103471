"""`outrider bench` on a terminal against the demo pair, with a ladder so short that its figures mean nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.forked import REPO, clean_environment
from tests.stack import Stack
from tests.terminal import terminal


def test_a_running_pair_is_measured_with_and_without(stack: Stack, tmp_path: Path) -> None:
    out, png = tmp_path / "out.json", tmp_path / "plot.png"
    ladder = ("--concurrency", "1", "--concurrency", "2", "--requests", "10", "--max-tokens", "8")
    args = ("--gateway", stack.http, *ladder, "--json", str(out), "--png", str(png))
    outrider = (sys.executable, "-m", "outrider.cli", "bench")
    with terminal(*outrider, *args, env=clean_environment(), rows=70, cwd=str(REPO)) as shown:
        assert shown.wait(60) == 0, shown.text()
        text = shown.text()
    assert re.search(r"^1 at once .* 20/20 requests ", text, re.MULTILINE)  # the rung's progress
    assert re.search(r"^ +2 +10\+10 +0\+0 +[\d.]+ +[\d.]+ +[\d.]+ +\d+ % +[\d.]+$", text, re.MULTILINE), text
    for seen in ("Tokens/s", "ratio (95 %)", "Latency: p50/p95/p99", "without", "█", "●", "└─"):
        assert seen in text, text
    assert "2 at once:" in text and "3 turns are too few" in text
    first, second = json.loads(out.read_text())["rungs"]
    assert (first["num_turns"], second["num_turns"]) == (5, 3)
    for arm in (*first["arms"].values(), *second["arms"].values()):
        assert arm["num_requests"] == 10 and arm["num_failed"] == 0, arm
        assert 0 < arm["first_token_s"]["p50"] <= arm["answer_s"]["p50"]
    drafted, plain = first["arms"]["with"], first["arms"]["without"]
    assert 0 < drafted["acceptance_rate"] <= 1 < drafted["tokens_per_target_pass"]
    assert plain["acceptance_rate"] is None and plain["tokens_per_target_pass"] == 1
    low, high = first["gain"]["interval"]
    assert low <= first["gain"]["ratio"] <= high and second["gain"]["interval"] is None
    assert png.read_bytes().startswith(b"\x89PNG")
    assert stack.target_info().num_slots_in_use == stack.draft_info().num_slots_in_use == 0


def test_a_ctrl_c_leaves_the_rungs_that_are_through(stack: Stack, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ladder = ("--concurrency", "1", "--concurrency", "2", "--seconds", "1", "--max-tokens", "8")
    args = ("bench", "--gateway", stack.http, *ladder, "--json", str(out))
    with terminal(
        sys.executable, "-m", "outrider.cli", *args, env=clean_environment(), rows=60, cwd=str(REPO)
    ) as shown:
        shown.wait_for("2 at once")
        shown.press("\x03")
        assert shown.wait(10) == 130, shown.text()
        assert "interrupted: 1 of 2 rungs are through" in shown.text() and "1 at once: " in shown.text()
    found = json.loads(out.read_text())
    assert found["interrupted"] and [rung["concurrency"] for rung in found["rungs"]] == [1]
