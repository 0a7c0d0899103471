"""Parameters of drafting: what is K, what a request may ask for together, and what a message may say."""

import pytest

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.speculation import (
    DEFAULT_TOPK,
    Speculation,
    check_num_draft_tokens,
    check_what_is_drafted,
    read_num_draft_tokens,
)
from outrider.wire.requests.tree_shape import TreeShape

PAIRS = TreeShape.parse("2x2")
"""Two nodes with two children each: 6 nodes, 2 deep."""


def test_k_is_a_number_or_auto() -> None:
    assert [read_num_draft_tokens(text) for text in ("0", "007", "64", "auto")] == [0, 7, 64, "auto"]
    for text in ("65", "-1", "1.5", "", "AUTO"):
        with pytest.raises(InvalidRequest, match="must be a whole number from 0 to 64, or auto"):
            read_num_draft_tokens(text)
    for value in (True, 5.0, None):
        with pytest.raises(InvalidRequest, match=f"^k is {value}, must be") as refused:
            check_num_draft_tokens(value, "k")
        assert refused.value.param == "k"


@pytest.mark.parametrize(
    ("num_draft_tokens", "tree", "drafter", "message"),
    [
        (6, None, None, "num_draft_tokens is 6, and at most 5 tokens are drafted"),
        (None, PAIRS, None, "tree is 2x2, 6 nodes, and at most 5 tokens are drafted"),
        (3, TreeShape.parse("2x1"), None, "tree is 2x1 and num_draft_tokens 3, which is of chains"),
        (None, TreeShape.parse("2x1"), Drafter.NGRAM, "tree is 2x1 and drafter ngram, which asks no model"),
    ],
)
def test_what_excludes_each_other_is_named(
    num_draft_tokens: int | None, tree: TreeShape | None, drafter: Drafter | None, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_what_is_drafted(num_draft_tokens, tree, drafter, 5)
    check_what_is_drafted("auto", None, Drafter.NGRAM, 5)
    check_what_is_drafted(5, None, None, 5)
    check_what_is_drafted(None, PAIRS, Drafter.NGRAM_MODEL, 6)


def test_depth_and_chains_within_a_budget() -> None:
    plain, auto, fixed = Speculation(), Speculation("auto", 8), Speculation(3, 8)
    tree = Speculation("auto", 8, PAIRS)
    assert [one.max_depth for one in (plain, auto, fixed, tree)] == [0, 8, 3, 2]
    assert [one.chain_len(2) for one in (auto, fixed)] == [2, 2] and fixed.chain_len(5) == 3
    assert [one.is_fixed for one in (plain, auto, fixed, tree)] == [False, False, True, True]
    assert plain.is_plain and Speculation(0, 8).is_plain and not auto.is_plain


def test_a_message_brings_the_same_parameters() -> None:
    for sent in (
        Speculation(),
        Speculation("auto", 8, PAIRS, draft_index=7, explain=True),
        Speculation(5, 8, None, DraftLogprobs.TOPK, 16, is_sequential=True),
    ):
        assert Speculation.from_proto(sent.to_proto(), 300) == sent
    assert Speculation.from_proto(pb.Speculation(), 300).draft_topk == DEFAULT_TOPK


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (Speculation(9, 8), "num_draft_tokens is 9, must be from 0 to 8"),
        (Speculation("auto", 65), "max_draft_tokens is 65, must be from 0 to 64"),
        (Speculation("auto", 5, PAIRS), "nodes of tree is 6, must be from 0 to 5"),
        (Speculation("auto", 8, draft_index=8), "draft_index is 8, must be from 0 to 7"),
        (Speculation("auto", 8, draft_topk=301), "draft_topk is 301, must be from 0 to 300"),
        (Speculation("auto", 8, None, DraftLogprobs.TOPK, 0), "draft_topk is 0, must be from 1 to 300"),
    ],
)
def test_a_message_with_what_is_not_allowed_is_refused(sent: Speculation, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Speculation.from_proto(sent.to_proto(), 300)
