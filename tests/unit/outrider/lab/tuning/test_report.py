"""What is said of a study whose numbers are known, as tables and as JSON."""

import json

import pytest

from outrider.lab.tuning.report import reason, to_json
from tests.unit.outrider.lab.tuning.known_study import EVERY_K, studied


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
