"""The detokeniser against `decode`: whatever the chunks, the stops and the kind of tokenizer, the text is the same."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.rounds.detokenizer import Detokenizer
from gateway.tokenizer import Tokenizer

DEMO = Path(__file__).parents[4] / "models/demo/target/tokenizer.json"
WORDS = ["▁", "▁▁", "▁the", "the", "▁a", "a", "b", "ab", "é", "▁é", "日", ".", "\n", "�"]


def byte_level() -> Tokenizer:
    return Tokenizer(DEMO.read_text(encoding="utf-8"), {}, None)


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: ▁ for a space, <0xNN> for bytes outside the vocabulary, the first space dropped."""
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoder = {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    return built({"type": "BPE", "vocab": ids(tokens), "merges": [], "byte_fallback": True}, decoder, special=3)


def metaspace() -> Tokenizer:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return built({"type": "BPE", "vocab": ids(["<s>", *WORDS]), "merges": []}, decoder, special=1)


def wordpiece() -> Tokenizer:
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    vocab = ids(["[CLS]", "the", "##s", "do", "n't", ".", "日", "##é", "!", "a"])
    model = {"type": "WordPiece", "vocab": vocab, "unk_token": "[CLS]", "continuing_subword_prefix": "##"}
    return built({**model, "max_input_chars_per_word": 100}, decoder, special=1)


def ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def built(model: dict[str, Any], decoder: dict[str, Any], special: int) -> Tokenizer:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = list(model["vocab"])[:special]
    added = [{"id": index, "content": name, "special": True, **flags} for index, name in enumerate(names)]
    parts: dict[str, Any] = {"version": "1.0", "added_tokens": added, "model": model, "decoder": decoder}
    parts |= dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return Tokenizer(json.dumps(parts), {}, None)


TOKENIZERS = {kind.__name__: kind() for kind in (byte_level, sentencepiece, metaspace, wordpiece)}
BYTE_LEVEL = TOKENIZERS["byte_level"]
SENTENCEPIECE = TOKENIZERS["sentencepiece"]


def text_of(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], stop: tuple[str, ...]) -> tuple[str, int | None]:
    """(all deltas, tokens used or None without a stop)."""
    detokenizer = Detokenizer(tokenizer, stop)
    text, used = "", 0
    for chunk in chunks:
        pushed = detokenizer.push(chunk)
        text += pushed.text_delta
        used += pushed.num_kept
        assert len(pushed.tokens) == pushed.num_kept
        if pushed.stop is not None:
            return text, used
        assert pushed.num_kept == len(chunk)
    return text + detokenizer.finish()[0], None


def cut(values: Sequence[int], points: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(point % (len(values) + 1) for point in points), len(values)]
    return [values[low:high] for low, high in pairwise(bounds)]


def expected(text: str, stop: tuple[str, ...]) -> str:
    """The law, stated another way than the code: grow the text by characters until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        ended = [text[:end].removesuffix(each) for each in stop if text[:end].endswith(each)]
        if ended:
            return min(ended, key=len)
    return text


def token_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40)


@st.composite
def cases(draw: st.DrawFn, tokenizer: Tokenizer, values: st.SearchStrategy[list[int]]) -> tuple[Any, ...]:
    """Tokens, where pushes are cut, and stops: mostly pieces of the very text, so that they occur."""
    tokens = draw(values)
    text = tokenizer.decode(tokens)
    piece = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda at: text[at[0] : at[0] + at[1]])
    stop = draw(st.lists(st.one_of(piece, st.text(" ab.\n", max_size=3)).filter(bool), max_size=4))
    return tokens, draw(st.lists(st.integers(0, 40), max_size=8)), tuple(stop)


@given(cases(BYTE_LEVEL, token_lists(BYTE_LEVEL)))
def test_byte_level_equals_decode(case: tuple[list[int], list[int], tuple[str, ...]]) -> None:
    tokens, points, stop = case
    text, used = text_of(BYTE_LEVEL, cut(tokens, points), stop)
    assert text == expected(BYTE_LEVEL.decode(tokens), stop)
    if used is not None:
        assert any(each in BYTE_LEVEL.decode(tokens[:used]) for each in stop)
        before = BYTE_LEVEL.decode(tokens[: used - 1]).rstrip("\ufffd")  # half a character may become another
        assert not any(each in before for each in stop)


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece"])
def test_other_decoders_equal_decode(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]

    @given(cases(tokenizer, token_lists(tokenizer)))
    def check(case: tuple[list[int], list[int], tuple[str, ...]]) -> None:
        tokens, points, stop = case
        assert text_of(tokenizer, cut(tokens, points), stop)[0] == expected(tokenizer.decode(tokens), stop)

    check()


def byte_ids(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


# Runs of byte tokens are whole characters, or broken at their start: the law has no say on others (see Detokenizer).
RUNS = st.one_of(
    st.text("é日😀 a\n", min_size=1, max_size=4).map(lambda text: byte_ids(text.encode())),
    st.sampled_from(["é", "日", "😀"]).map(lambda char: byte_ids(char.encode()[:-1])),
    st.sampled_from([b"\xff\x80", b"\xe2\x82\xe2"]).map(byte_ids),
)
PLAIN = st.lists(st.sampled_from([1, 2, *range(259, 259 + len(WORDS))]), min_size=1, max_size=4).filter(
    lambda tokens: any(token > 2 for token in tokens)  # a special token does not part two runs
)
MIXED = st.lists(st.tuples(RUNS, PLAIN), max_size=6).map(
    lambda pairs: [token for run, plain in pairs for token in run + plain]
)


@given(cases(SENTENCEPIECE, st.tuples(MIXED, RUNS | PLAIN).map(lambda both: both[0] + both[1])))
def test_sentencepiece_with_byte_fallback_equals_decode(case: tuple[list[int], list[int], tuple[str, ...]]) -> None:
    tokens, points, stop = case
    assert text_of(SENTENCEPIECE, cut(tokens, points), stop)[0] == expected(SENTENCEPIECE.decode(tokens), stop)


def test_a_character_is_never_split() -> None:
    tokens = BYTE_LEVEL.encode("日😀")
    assert len(tokens) > 2, "the case needs characters of several tokens"
    deltas = [Detokenizer(BYTE_LEVEL, ()).push(tokens[:1]).text_delta]
    detokenizer = Detokenizer(BYTE_LEVEL, ())
    deltas += [detokenizer.push([token]).text_delta for token in tokens]
    assert [delta for delta in deltas if delta] == ["日", "😀"]


AB = st.text("ab", min_size=1, max_size=8)


@given(st.text("ab", max_size=30), st.lists(AB, max_size=4).map(tuple))
@example("aaab", ("aab",))  # it begins within a false start of itself
def test_text_is_held_back_only_while_a_stop_string_may_have_begun(text: str, stop: tuple[str, ...]) -> None:
    detokenizer, sent = Detokenizer(BYTE_LEVEL, stop), ""
    for size, char in enumerate(text, 1):
        pushed = detokenizer.push(BYTE_LEVEL.encode(char))
        sent += pushed.text_delta
        if expected(text[:size], stop) != text[:size]:
            assert sent == expected(text[:size], stop)
            assert pushed.stop == max((each for each in stop if text[:size].endswith(each)), key=len)
            return
        begun = [each[:n] for each in stop for n in range(len(each)) if text[:size].endswith(each[:n])]
        assert sent == text[:size].removesuffix(max(begun, key=len, default=""))
    assert sent + detokenizer.finish()[0] == text


def test_token_texts_and_offsets_line_up_with_the_text() -> None:
    tokens = BYTE_LEVEL.encode("naïve 😀 code")
    pushed = Detokenizer(BYTE_LEVEL, ()).push(tokens)
    for text, offset in pushed.tokens:
        if "\ufffd" not in text:
            assert pushed.text_delta[offset : offset + len(text)] == text
    assert pushed.tokens[0][1] == 0


def test_work_does_not_grow_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    real = Tokenizer.decode

    def counted(self: Tokenizer, tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return real(self, tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    detokenizer = Detokenizer(SENTENCEPIECE, ())
    for token in byte_ids(b"\xff" * 300) + [259, 264] * 300:
        detokenizer.push([token])
    assert longest <= 4
