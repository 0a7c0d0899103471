"""What is said of a study whose numbers are known, as tables and as JSON."""

import io
import json

import pytest
from rich.console import Console

from outrider.lab.tuning.report import reason, show, to_json
from tests.unit.outrider.lab.tuning.known_study import EVERY_K, studied


def test_a_study_is_shown_in_80_columns() -> None:
    study = studied()
    console = Console(width=80, file=io.StringIO(), record=True)
    show(study, console)
    text = console.export_text()
    assert "…" not in text
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in text.splitlines() if line.startswith("│")}
    point = study.points[12]
    assert [cell.strip() for cell in rows["12"]][1:3] == [f"{point.paper_speedup:.2f}x", f"{point.speedup.median:.2f}x"]
    assert "K = 4, unigram is not offered: no such thing" in text
    assert "temperature 1: K = 4, lookup+model" in text and "the fastest measured" in text


def test_a_report_gives_the_reason_why_drafts_do_not_pay() -> None:
    study = studied(faster_alone=True)
    said = reason(study)
    assert said.startswith("do not speculate: the fastest setting with drafts, K = 4, lookup+model, has 0.")
    assert "the draft's alpha 0.00, c 0.10" in said
    found = to_json(study)["recommendation"]
    assert found["speculate"] is False and found["gateway_settings"] == {"num_draft_tokens": "0"}


def test_the_json_has_all_that_the_tables_have() -> None:
    study = studied()
    found = json.loads(json.dumps(to_json(study)))
    assert [point["k"] for point in found["speeds"]] == list(EVERY_K)
    assert found["alpha"] == pytest.approx(study.alpha)
    assert [drafter["name"] for drafter in found["drafters"]] == ["plain", "K = 4", "K = 4, lookup+model"]
    settings = found["recommendation"]["gateway_settings"]
    assert settings["num_draft_tokens"] == "4" and settings["drafter"] == "lookup+model"
    assert found["not_offered"] == {"K = 4, unigram": "no such thing"}
