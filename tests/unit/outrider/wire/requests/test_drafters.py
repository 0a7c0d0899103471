"""Names of drafters: who drafts by each, and what is no name."""

import re

import pytest

from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.drafters import Drafter


def test_a_bar_stands_for_a_plus_and_what_is_no_name_is_refused() -> None:
    assert Drafter.parse("ngram|model") is Drafter.NGRAM_MODEL
    assert Drafter.NGRAM.merged() is Drafter.NGRAM_AND_MODEL and Drafter.MODEL.merged() is Drafter.MODEL_AND_MODEL
    for label in ("heads+model", "ngram&ngram", "model+ngram", ""):
        with pytest.raises(
            InvalidRequest, match=re.escape(f"speculation.drafter is {label!r}, must be one of auto, model, ngram")
        ):
            Drafter.parse(label, "speculation.drafter")
