"""Names of drafters: who drafts by each, and what is no name."""

from __future__ import annotations

import re

import pytest

from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.drafters import Drafter


def test_names_of_drafters() -> None:
    own = ["ngram", "lookup", "unigram", "bigram", "heads", "lookahead", "pass"]
    combined = ["ngram+model", "lookup+model", "lookahead+model", "prediction", "prediction+model"]
    united = ["ngram&model", "lookup&model", "model&model"]
    assert list(Drafter) == ["auto", "model", *own, *combined, *united]
    assert [each for each in Drafter if each.is_merged] == united
    assert [(each.own, each.needs_draft_worker) for each in Drafter] == [
        (Drafter.AUTO, False),
        (None, True),
        *((Drafter(each), False) for each in own),
        (Drafter.NGRAM, True),
        (Drafter.LOOKUP, True),
        (Drafter.LOOKAHEAD, True),
        (Drafter.PREDICTION, False),
        (Drafter.PREDICTION, True),
        (Drafter.NGRAM, True),
        (Drafter.LOOKUP, True),
        (None, True),
    ]


def test_a_bar_stands_for_a_plus_and_what_is_no_name_is_refused() -> None:
    assert Drafter.parse("ngram|model") is Drafter.NGRAM_MODEL
    assert Drafter.NGRAM.merged() is Drafter.NGRAM_AND_MODEL and Drafter.MODEL.merged() is Drafter.MODEL_AND_MODEL
    for label in ("heads+model", "ngram&ngram", "model+ngram", ""):
        with pytest.raises(
            InvalidRequest, match=re.escape(f"speculation.drafter is {label!r}, must be one of auto, model, ngram")
        ):
            Drafter.parse(label, "speculation.drafter")
