"""Which settings are tried, and how the gateway is told."""

from __future__ import annotations

import pytest

from outrider.lab.tuning.settings import (
    alternatives,
    chain,
    environment,
    gateway_settings,
    max_draft_tokens,
)
from outrider.wire.requests.tree_shape import TreeShape


def test_a_setting_is_told_to_the_gateway_in_full() -> None:
    found = alternatives(4, 12, 1.0, [])
    assert list(found)[:6] == ["plain", "K = auto", "K = 4", "K = 4, full", "K = 4, topk:128", "K = 4, coupled"]
    assert gateway_settings(found["K = 4, topk:128"]) == {
        "num_draft_tokens": "4",
        "drafter": "model",
        "acceptance": "rejection",
        "draft_logprobs": "topk:128",
    }
    coupled = {"num_draft_tokens": "4", "drafter": "model", "acceptance": "coupled"}
    assert gateway_settings(found["K = 4, coupled"]) == coupled
    assert gateway_settings(found["plain"]) == {"num_draft_tokens": "0"}
    assert gateway_settings(chain(33, 0.0)) == {
        "num_draft_tokens": "33",
        "max_draft_tokens": "33",
        "drafter": "model",
    }
    assert environment({"num_draft_tokens": "4", "acceptance": "coupled"}) == (
        "OUTRIDER_GATEWAY_NUM_DRAFT_TOKENS=4 OUTRIDER_GATEWAY_ACCEPTANCE=coupled"
    )


@pytest.mark.parametrize(
    ("k", "shapes"),
    [
        (1, ("3", "2x2", "best:8x2")),
        (2, ("3x1", "best:6x2", "2x2", "best:8x2")),
        (4, ("3x1x1x1", "best:12x4", "2x2x1x1", "best:16x4")),
        (12, ("3x1x1x1", "best:12x4", "2x2x1x1x1x1x1x1", "best:32x8")),
    ],
)
def test_trees_are_small_or_as_deep_as_the_chain_and_no_larger_than_a_step(k: int, shapes: tuple[str, ...]) -> None:
    found = {name: wish for name, wish in alternatives(k, 12, 1.0, []).items() if wish.tree}
    assert list(found) == [f"tree {shape}{rule}" for shape in shapes for rule in ("", ", coupled")]
    for wish in found.values():
        assert wish.tree is not None and wish.num_draft_tokens is None
        assert TreeShape.parse(wish.tree).most_nodes <= max_draft_tokens(k)
    assert gateway_settings(found[f"tree {shapes[0]}, coupled"]) == {
        "tree": shapes[0],
        "drafter": "model",
        "acceptance": "coupled",
    }
