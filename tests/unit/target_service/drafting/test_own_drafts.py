"""What a target drafts by itself."""

from typing import Any

from outrider.wire.requests.drafters import Drafter
from target_service.drafting.own_drafts import OwnDrafts

UNION = Drafter.NGRAM_AND_MODEL


def test_a_target_without_token_trees_offers_no_unions() -> None:
    ngram: Any = object()
    assert UNION in OwnDrafts({Drafter.NGRAM: ngram}, supports_trees=True).available
    alone = OwnDrafts({Drafter.NGRAM: ngram})
    assert UNION not in alone.available
    refusal = alone.refusal(UNION)
    assert refusal is not None and "ngram&model takes a model and an attention_path" in refusal.message
