"""What bench-peers says of rates that are none to compare with, and that it leaves no engine behind."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import engines
from benchmarks.peers.compare import Difference
from benchmarks.peers.engines import EngineProcess, Kind

SETTING = peers.Setting("float32", 0.0, 8)


def a_bench(differences: dict[str, float]) -> peers.Bench:
    """With Outrider at 20 and others at 40 tokens/s; `differences` are gaps by engine."""
    bench = peers.Bench.__new__(peers.Bench)
    bench.options = argparse.Namespace(profile=False)
    phases = {name: [0.25] for name in ("propose", "deliver", "verify", "overhead")}
    bench.cells = {
        (name, SETTING, True): peers.Cell([rate], 100, accepted, phases)
        for name, rate, accepted in (
            ("Outrider", 20.0, 30),
            ("right", 30.0, 30),
            ("wrong", 40.0, 30),
            ("idle", 50.0, 1),
        )
    } | {(name, SETTING, False): peers.Cell([10.0]) for name in ("Outrider", "right", "wrong", "idle")}
    found = [(name, SETTING, True, Difference(0, 0, 1, 2, gap)) for name, gap in differences.items()]
    bench.__dict__["differences"] = found
    return bench


def test_wrong_answers_and_useless_drafts_are_marked_and_not_compared_with() -> None:
    rows = {row[0]: row[3:] for row in peers._rows(a_bench({"wrong": 2.0, "right": 1e-4}), SETTING)}
    assert rows["right"] == ["30.0", "0.67", "30 %"]  # a near-tie is nobody's fault
    assert rows["wrong"] == ["40.0 †", "", "30 %"]
    assert rows["idle"] == ["50.0 ‡", "", "1 %"]


def test_what_is_marked_leads_no_row() -> None:
    bench = a_bench({"wrong": 2.0})
    tables: list[tuple[str, object, list[list[str]]]] = []
    bench.report = argparse.Namespace(table=lambda *table: tables.append(table))  # type: ignore[assignment]
    peers._write_profile(bench, [SETTING])
    assert [row[:2] for row in tables[0][2]] == [[f"{SETTING}, with draft", "right"]]


@pytest.fixture
def sleepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """Two engines, of which the second never gets ready: it is interrupted."""
    (tmp_path / "good.py").write_text(
        'print(\'{"ready": "1", "pids": {}}\', flush=True)\nimport time\ntime.sleep(600)\n'
    )
    kinds = [Kind(name, "good", Path(sys.executable)) for name in ("first", "second")]
    monkeypatch.setattr(engines, "HERE", tmp_path)
    monkeypatch.setattr(engines, "CLOSE_S", 0.1)
    monkeypatch.setattr(peers, "WORK", tmp_path)
    monkeypatch.setattr(peers, "kinds", lambda ours: kinds)
    return kinds


def test_an_interrupt_while_one_loads_leaves_no_engine(sleepers: list[Kind], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def ready(self: EngineProcess) -> str:
        started.append(self._process.pid)
        if self.kind is sleepers[1]:
            raise KeyboardInterrupt
        self._pause()
        return "1"

    monkeypatch.setattr(EngineProcess, "ready", ready)
    monkeypatch.setattr(EngineProcess, "run", lambda self, job: "nothing")
    bench = peers.Bench.__new__(peers.Bench)
    bench.absent, bench.versions, bench.prompts, bench.cores = {}, {}, [[1]], [0]
    bench.target = Path("nowhere")
    bench.options = argparse.Namespace(
        ours_target="", ours_draft="", engines=None, size="94M", num_draft_tokens=4, dtype=["float32"], concurrency=[1]
    )
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert len(started) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
