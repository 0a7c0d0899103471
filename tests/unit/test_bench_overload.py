"""What `make bench-overload` and `make soak` take for a fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.arrivals import Asked, what_is_missing
from benchmarks.footprint import Held, kind_of
from benchmarks.overload import Report, add_latencies, add_outcomes, add_recovery
from benchmarks.soak import add_footprint, add_requests


def stream(*reasons: str | None, num_tokens: int = 3, last: str = "[DONE]") -> bytes:
    events: list[dict[str, Any]] = [{"choices": [{"text": "x", "finish_reason": reason}]} for reason in reasons]
    events.append({"choices": [], "usage": {"completion_tokens": num_tokens}})
    return "".join(f"data: {event}\n\n" for event in [*map(json.dumps, events), last]).encode()


def test_a_whole_answer_has_all_its_tokens_and_one_finish_reason() -> None:
    assert what_is_missing(stream(None, "length"), 3) is None
    assert what_is_missing(stream(None, "length"), 4) is not None
    assert what_is_missing(stream(None, "stop"), 3) is not None
    assert what_is_missing(stream("length", "length"), 3) is not None
    assert what_is_missing(stream(None, None), 3) is not None
    assert what_is_missing(stream(None, "length", last='{"choices": []}'), 3) is not None
    assert what_is_missing(b"", 3) is not None
    assert "broke" in str(what_is_missing(b'data: {"error": "broke"}\n\ndata: [DONE]\n\n', 3))


def answers(seconds: float, total_s: float = 1.0, from_s: float = 0.0) -> list[Asked]:
    """Ten a second."""
    sent = [from_s + index / 10 for index in range(int(10 * seconds))]
    return [Asked(at, at + total_s / 10, at + total_s, 200, None) for at in sent]


def refusal(after_s: float, retry_after: str | None = "1") -> Asked:
    return Asked(0.0, None, after_s, 429, retry_after)


@pytest.fixture
def report() -> Report:
    return Report("x", "X", _machine={})


def test_slower_answers_and_late_or_silent_refusals_are_violations(report: Report) -> None:
    assert add_latencies(report, answers(10), answers(10, 1.4)) == []
    assert len(add_latencies(report, answers(10), answers(10, 1.6))) == 6
    seconds = {"overload": 10.0}
    assert add_outcomes(report, {"overload": [refusal(0.2)]}, seconds) == []
    assert "refusals took 300 ms" in add_outcomes(report, {"overload": [refusal(0.3)]}, seconds)[0]
    assert "without Retry-After" in add_outcomes(report, {"overload": [refusal(0.1, None)]}, seconds)[0]


def test_recovery_is_soon_and_lasts(report: Report) -> None:
    assert add_recovery(report, answers(30), [*answers(10, 3.0), *answers(20, from_s=10.0)]) == []
    assert add_recovery(report, answers(30), answers(30, 3.0)) == ["latency did not recover"]
    assert "did not stay" in add_recovery(report, answers(30), [*answers(10), *answers(20, 3.0, from_s=10.0)])[0]
    assert "only 20 s after" in add_recovery(report, answers(30), [*answers(20, 3.0), *answers(30, from_s=20.0)])[0]


def held(own_mib: list[float]) -> list[Held]:
    return [Held(float(second), 2**30, int(mib * 2**20), 9, 9) for second, mib in enumerate(own_mib)]


def test_growth_is_found_as_a_slope_and_as_a_step(report: Report) -> None:
    assert add_footprint(report, {"gateway": held([100.0, 101.0] * 100)}) == []
    assert "grows by" in add_footprint(report, {"gateway": held([100 + index / 20 for index in range(200)])})[0]
    step = add_footprint(report, {"gateway": held([100.0] * 170 + [120.0] * 30)})
    assert step == ["gateway has 20.0 MiB more in the last tenth of the run than in the first"]


def test_a_process_that_ended_is_told_and_what_is_rays_own_is_shown_and_not_judged(report: Report) -> None:
    growing = held([100 + index / 20 for index in range(200)])
    assert add_footprint(report, {"gateway": held([100.0] * 200), "Ray's raylet": growing}) == []
    assert {"gateway", "Ray's raylet"} <= set(report.data["held"])
    ended = add_footprint(report, {"gateway": held([100.0] * 200), "target": held([100.0] * 90), "draft": []})
    assert ended == ["target ended while the load went on", "draft ended while the load went on"]


def test_parts_are_known_by_their_command_lines() -> None:
    ray = "/venv/lib/python3.11/site-packages/ray"
    lines = {
        "/venv/bin/python -m deploy.launcher --config -": "deploy.launcher",
        "/venv/bin/python -m gateway --port 0": "gateway",
        f"{ray}/core/src/ray/raylet/raylet --raylet_socket_name=x": "Ray's raylet",
        f"{ray}/core/src/ray/gcs/gcs_server --log_dir=x": "Ray's gcs_server",
        f"/venv/bin/python -u {ray}/_private/log_monitor.py --logs-dir=x": "Ray's log_monitor",
        "ray::DashboardAgent": "Ray's DashboardAgent",
        "/venv/bin/python -c from multiprocessing.spawn import spawn_main": None,
        "/venv/bin/python -m pytest": None,
        "": None,
    }
    assert {line: kind_of(line.split(" ")) for line in lines} == lines


def test_latency_that_drifts_is_a_violation(report: Report) -> None:
    assert add_requests(report, answers(100)) == []
    drifted = add_requests(report, [*answers(50), *answers(50, 1.5, from_s=50.0)])
    assert [each.partition(" takes")[0] for each in drifted] == ["first token", "whole answer"]
