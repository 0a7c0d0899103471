"""Texts between special tokens, where their characters end, and the tokens that a tokenizer makes of them."""

import json

import pytest
from tokenizers import Tokenizer, models, processors

from outrider.drafting.text_runs import TextRun, bytes_of, encode, index_at, last_texts, piece_tokenizer, start_ids_of

VOCAB = {"<s>": 0, "a": 1, "b": 2, "ab": 3}
SPELLING = [None, b"a", b"b", b"ab"]


def tokenizer_json(start: bool = True) -> bytes:
    """A tokenizer that joins a and b, and puts <s> before each text."""
    tokenizer = Tokenizer(models.BPE(VOCAB, [("a", "b")]))
    tokenizer.add_special_tokens(["<s>"])
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str().encode()


def test_a_character_of_several_tokens_ends_with_the_last_of_them() -> None:
    run = TextRun()
    for num_committed, raw in enumerate((b"a", b"\xc3", b"\xa4", b"b"), 1):
        run.add(raw, num_committed)
        assert run.is_whole is (num_committed != 2)
    assert (run.text, run.ends) == ("a\u00e4b", {1: 1, 2: 3, 3: 4})


def test_bytes_that_are_no_character_are_replaced() -> None:
    run = TextRun()
    run.add(b"\xff", 1)
    assert (run.text, run.ends) == ("\ufffd", {1: 1})


@pytest.mark.parametrize(
    ("ids", "expected"), [([1, 2], [1, 2]), ([1, 0, 2, 3], [2, 3]), ([1, 0], []), ([1, 99, 3], [3]), ([], [])]
)
def test_a_special_or_unknown_id_ends_the_text_before_it(ids: list[int], expected: list[int]) -> None:
    assert last_texts(SPELLING, ids) == expected
    assert bytes_of(SPELLING, 99) is None


def test_a_piece_is_tokenized_as_plain_text() -> None:
    pieces = piece_tokenizer(tokenizer_json())
    assert encode(pieces, "ab").ids == [3]
    assert 0 not in encode(pieces, "<s>a").ids
    assert json.loads(pieces.to_str())["post_processor"] is None


def test_ids_that_a_tokenizer_puts_before_a_text() -> None:
    assert (start_ids_of(tokenizer_json()), start_ids_of(tokenizer_json(start=False))) == ((0,), ())


@pytest.mark.parametrize(("start", "index"), [(0, 0), (1, None), (2, 1), (3, 2), (4, None)])
def test_a_token_that_reaches_beyond_a_character_does_not_begin_there(start: int, index: int | None) -> None:
    """abba is ab, b, a."""
    encoding = encode(piece_tokenizer(tokenizer_json()), "abba")
    assert encoding.ids == [3, 2, 1]
    assert index_at(encoding, start) == index
