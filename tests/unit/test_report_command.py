"""`outrider report`: what it would run and where, and that a section which fails leaves the others alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.cli import report
from outrider.cli.main import app
from outrider.cli.reporting import pair
from outrider.cli.reporting.document import Document, markdown_table, shown
from outrider.cli.reporting.sections import Section, State
from outrider.cli.supervisor import PartFailed
from outrider.wire.errors import ConfigError
from outrider.wire.processes import Event, StopRequested

STEP = {"event": "step", "rows": 8, "tokens": 6, "context": 512, "floor_s": 0.002}
LAW = {"event": "law", "rule": "by token", "num_sequences": 100, "statistic": 5.0, "degrees": 99}


def devices(num_gpus: int) -> Event:
    gpus = [{"name": "GPU X", "memory_bytes": 80 << 30}] * num_gpus
    return {"event": "devices", "cuda": "12.8", "driver": "NVRM 580", "gpus": gpus}


def reported(*args: str) -> Result:
    return CliRunner().invoke(app, ["report", *args])


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes torch see so many GPUs."""
    return lambda count: monkeypatch.setattr(report, "devices_here", lambda: devices(count))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, gpus: Callable[[int], None]) -> Callable[..., None]:
    """Puts these sections in place of the pair's."""
    gpus(2)

    def put(*sections: Section) -> None:
        monkeypatch.setattr(pair.PairReport, "sections", lambda self: list(sections))

    return put


def section(title: str, *events: Event, error: BaseException | None = None) -> Section:
    def run() -> Iterator[Event]:
        yield from events
        if error is not None:
            raise error

    return Section(title, f"Plans {title}.", run)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--out", "/nowhere/r.md"), ("/nowhere/r.md", "in a folder that is there")),
        (("--out", "r.json"), ("r.json", "*.md")),
        (("--draft", "ngram"), ("--draft ngram is no model",)),
        (("--rehearse", "--draft-device", "cuda:1"), ("--rehearse and --draft-device",)),
        (("--target", "models/x"), ("only one model of the pair is named",)),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_what_cannot_be_is_refused_at_once(
    args: tuple[str, ...], words: tuple[str, ...], gpus: Callable[[int], None]
) -> None:
    gpus(2)
    made = reported(*args)
    assert made.exit_code == 1 and not made.stdout
    assert all(word in made.stderr for word in words), made.stderr


def test_without_a_gpu_it_says_what_it_would_run(gpus: Callable[[int], None]) -> None:
    gpus(0)
    made = reported()
    assert made.exit_code == report.EXIT_NO_GPU
    titles = [line.partition(":  ")[0] for line in made.stdout.splitlines()]
    for title in ("versions: ", "pair: Widens", "laws on cuda:1: ", "draft on cuda:1: ", "split: ", "colocated: "):
        assert any(each.startswith(title) for each in titles), made.stdout
    assert "--rehearse" in made.stdout


def titles_of(num_gpus: int, *, target: str | None = None, draft: str | None = None, **values: Any) -> list[str]:
    workers = {
        role: {"model": model, "device": None, "dtype": None, "cpu_cores": None, **values}
        for role, model in (("target", target), ("draft", draft))
    }
    report._place(workers, num_gpus)
    made = pair.PairReport(workers, target is None, pair.ON_GPUS, devices(num_gpus), report.note_console())
    return [each.title for each in made.sections()]


def test_two_gpus_have_a_worker_each() -> None:
    assert titles_of(2, target="a", draft="b") == [
        *("versions", "doctor", "laws on cuda:0", "laws on cuda:1"),
        *("target on cuda:0", "draft on cuda:1", "split", "colocated"),
    ]


def test_one_gpu_has_both_workers_and_no_split() -> None:
    assert titles_of(1) == [
        *("versions", "pair", "doctor", "laws on cuda:0", "target on cuda:0", "draft on cuda:0", "colocated")
    ]


def test_one_gpu_is_told_in_the_head(planted: Callable[..., None], gpus: Callable[[int], None], tmp_path: Path) -> None:
    planted(section("a"))
    gpus(1)
    assert reported("--out", str(tmp_path / "r.md")).exit_code == 0
    head = (tmp_path / "r.md").read_text().split("- command")[0]
    assert "On GPU X." in head and "WIDENED" in head and "both would be on cuda:0" in head


def test_a_section_that_fails_is_told_and_the_rest_goes_on(planted: Callable[..., None], tmp_path: Path) -> None:
    planted(
        section("first", {**LAW, "p_value": 0.5}, error=ConfigError("no room for it")),
        section("second", error=PartFailed("the target ended", ["one line", "of its log"])),
        section("third", error=ZeroDivisionError("a bug")),
        section("fourth", {**STEP, "eager_s": 0.006, "graph_s": 0.003}),
    )
    made = reported("--out", str(tmp_path / "r.md"))
    assert made.exit_code == 1
    assert "failed, and told there: first, second, third" in made.stderr
    written, found = (tmp_path / "r.md").read_text(), json.loads((tmp_path / "r.json").read_text())
    assert [each["state"] for each in found["sections"]] == ["failed", "failed", "failed", "ran"]
    assert [len(each["events"]) for each in found["sections"]] == [1, 0, 0, 1]
    for words in ("no room for it", "the target ended\none line\nof its log", "ZeroDivisionError: a bug"):
        assert words in written
    assert "| by token | 100 | 5.0 | 99 | 0.5 | the target's law |" in written
    assert "| 8 x 6 | 512 | 2.00 | 6.00 | 3.00 | 2.00 | 1.50 |" in written


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StopRequested()], ids=lambda error: type(error).__name__)
def test_ctrl_c_leaves_what_there_is(error: BaseException, planted: Callable[..., None], tmp_path: Path) -> None:
    planted(
        section("first", LAW | {"p_value": 0.3}),
        section("second", LAW | {"p_value": 0.4}, error=error),
        section("third"),
    )
    made = reported("--out", str(tmp_path / "r.md"))
    assert made.exit_code == 130
    written, found = (tmp_path / "r.md").read_text(), json.loads((tmp_path / "r.json").read_text())
    assert [each["state"] for each in found["sections"]] == ["ran", "interrupted", "waiting"]
    assert written.count("| by token |") == 2
    assert "| third | not run | - |" in written


def test_a_report_of_a_cpu_says_so(planted: Callable[..., None], tmp_path: Path) -> None:
    planted(section("a"))
    reported("--rehearse", "--out", str(tmp_path / "r.md"))
    assert (tmp_path / "r.md").read_text().splitlines()[2].startswith("**A REHEARSAL ON THE CPU")


def a_pair() -> pair.PairReport:
    """The demo pair on one GPU, not yet widened."""
    workers = {
        role: {"model": None, "device": "cuda:0", "dtype": None, "cpu_cores": None} for role in ("target", "draft")
    }
    return pair.PairReport(workers, True, pair.ON_GPUS, devices(1), report.note_console())


def test_a_pair_that_was_not_widened_stops_what_needs_it() -> None:
    for one in a_pair().sections():
        if one.title in ("doctor", "target on cuda:0", "colocated"):
            one.carry_out()
            assert one.state is State.FAILED and one.error is not None and "not widened" in one.error


def test_a_law_that_is_wrong_is_called_so_and_fails_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{**LAW, "p_value": 1e-9}, {**LAW, "rule": "by block", "p_value": 0.5}]
    monkeypatch.setattr(pair, "_child", lambda task, what: iter(events))
    (one,) = (each for each in a_pair().sections() if each.title == "laws on cuda:0")
    one.carry_out()
    assert one.state is State.FAILED and one.error == "not the law of the target: by token" and one.events == events
    assert next(shown(events)).splitlines()[-2].endswith("| 1e-09 | WRONG |")


def test_steps_without_graphs_have_none() -> None:
    (table,) = shown([{**STEP, "eager_s": 0.006}])
    assert table.splitlines()[-1] == "| 8 x 6 | 512 | 2.00 | 6.00 | - | - | 3.00 |"


def test_steps_without_a_floor_have_none() -> None:
    (table,) = shown([{**STEP, "floor_s": None, "eager_s": 0.006}])
    assert table.splitlines()[-1] == "| 8 x 6 | 512 | - | 6.00 | - | - | - |"


def test_tables_have_their_numbers_to_the_right() -> None:
    assert markdown_table(("a", "b"), [["x", "1"]]) == "| a | b |\n|---|---:|\n| x | 1 |"


def test_every_kind_of_event_is_shown(tmp_path: Path) -> None:
    """What the children and the services yield: a kind without a form would lose the whole document."""
    arm = {
        "tokens_per_s": 10.0,
        "acceptance_rate": None,
        "tokens_per_target_pass": 1.5,
        "first_token_s": {"p50": 0.01},
        "token_s": {"p50": None},
    }
    rung = {"event": "rung", "concurrency": 4, "arms": {"with": arm, "without": arm}, "said": ["4 at once: pays"]}
    events: list[Event] = [
        {"event": "versions", "outrider": "1"},
        devices(2),
        {"event": "found", "check": "disk", "state": "warning", "found": "full", "remedy": "make room"},
        {"event": "widened", "role": "draft", "folder": "/x", "said": "made"},
        {"event": "same draws", "same": 3, "of": 4},
        {"event": "loaded", "path": "flash", "seconds": 2.345, "log": ["not fused: no CPU"]},
        {"event": "graphs", "captured": ["1 rows of 6 tokens"], "log": []},
        {"event": "bandwidth", "bytes_per_s": 3e12},
        {**rung, "gain": {"ratio": 1.5, "interval": [1.4, 1.6], "pays": True}},
        {**rung, "gain": None},
    ]
    one = section("all", *events)
    one.carry_out()
    document = Document(tmp_path / "r.md", "head", [one])
    document.write()
    written = document.path.read_text()
    for words in (
        "- GPUs: GPU X, 80 GiB; GPU X, 80 GiB",
        "- warning: disk: full -> make room",
        "The same draws as on the CPU: 3 of 4.",
        "- seconds: 2.3",
        "not fused: no CPU",
        "- captured: 1 rows of 6 tokens",
        "copied at 3000 GB/s",
        "| 4 | 10.0 | 10.0 | 1.50 (1.40-1.60) | - | 1.50 | 10.00 | - |",
        "| 4 | 10.0 | 10.0 | - |",
        "- 4 at once: pays",
    ):
        assert words in written, written
