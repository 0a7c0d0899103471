"""Tokens of one vocabulary as those of another: the same bytes, or nothing; told anew where what follows merges."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from outrider.drafting.token_bytes import read_spelling
from outrider.drafting.translation import Intersection, PaddedTranslation, Retokenization
from tests.other_tokenizers import TEXT, byte_level, digits_apart, json_of, sentencepiece

FAMILIES = {
    "byte-level": byte_level(),
    "digits apart": digits_apart(),
    "sentencepiece": sentencepiece(),
    "sentencepiece without a prefix": sentencepiece(prefix=False),
}
PAIRS = list(permutations(FAMILIES, 2))


@lru_cache
def between(target: str, draft: str) -> Intersection:
    sizes = (FAMILIES[target].get_vocab_size() + 5, FAMILIES[draft].get_vocab_size())
    return Intersection(json_of(FAMILIES[target]), json_of(FAMILIES[draft]), *sizes, (0,))


@lru_cache
def spelling(name: str) -> list[bytes | None]:
    return read_spelling(json_of(FAMILIES[name])).of


def bytes_of(name: str, ids: Sequence[int]) -> bytes:
    return b"".join(spelling(name)[each] or b"" for each in ids if each < len(spelling(name)))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


def told(translation: Intersection, retokenization: Retokenization) -> list[int]:
    """Without what texts begin with."""
    start = len(translation.start_ids)
    assert retokenization.ids[:start] == list(translation.start_ids)
    return retokenization.ids[start:]


def ends_within(raw: bytes) -> bool:
    """Whether the last bytes begin a character that they do not end."""
    for num in (1, 2, 3):
        try:
            raw[-num:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return True
    return False


class Written:
    """A target that commits tokens, goes back at times, and a draft that is told of it."""

    def __init__(self, target: str, draft: str) -> None:
        self.translation = between(target, draft)
        self.retokenization = self.translation.retokenization()
        self.committed: list[int] = []

    def commit(self, base_len: int, ids: Sequence[int]) -> None:
        before = list(self.retokenization.ids)
        self.committed[base_len:] = ids
        num_same = self.retokenization.commit(self.committed, base_len)
        assert self.retokenization.ids[:num_same] == before[:num_same]
        assert self.retokenization.num_ids_within(len(self.committed)) <= len(self.retokenization.ids)


words = st.text(st.sampled_from("the world wide_12 \n\t.('ßжёд日本語😀\u00e9e\u0301"), max_size=40)
texts = st.one_of(
    words, st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=25), st.just(TEXT)
)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_retokenized_text_has_the_bytes_that_were_committed(target: str, draft: str, data: st.DataObject) -> None:
    """Whatever the text, in pieces of any length, with tokens taken back."""
    written, goes_back = Written(target, draft), data.draw(st.integers(0, 5))
    ids = [each for text in data.draw(st.lists(texts, max_size=3)) for each in ids_of(FAMILIES[target], text)]
    while ids:
        num, last = data.draw(st.integers(1, 30)), len(written.committed)
        base_len = data.draw(st.integers(0, last)) if goes_back and data.draw(st.booleans()) else last
        goes_back -= base_len < last
        written.commit(base_len, ids[:num])
        del ids[:num]
        raw = bytes_of(target, written.committed)
        text, seen = raw.decode("utf-8", "replace"), bytes_of(draft, told(written.translation, written.retokenization))
        assert written.retokenization.is_whole == (not ends_within(raw))
        if "\ufffd" not in text:
            assert seen in (raw, b" " + raw)  # some put a space before a text


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@settings(max_examples=40)
@given(data=st.data())
def test_any_ids_are_retokenized(target: str, draft: str, data: st.DataObject) -> None:
    """Bytes that are no characters, special tokens and ids that the tokenizer lacks among them."""
    written = Written(target, draft)
    tokens = st.integers(0, FAMILIES[target].get_vocab_size() + 4)
    for ids in data.draw(st.lists(st.lists(tokens, min_size=1, max_size=12), max_size=6)):
        written.commit(len(written.committed), ids)
        assert all(0 <= each < FAMILIES[draft].get_vocab_size() for each in written.retokenization.ids)
        seen = told(written.translation, written.retokenization)
        assert not any(_is_special(FAMILIES[draft], each) for each in seen)


def _is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    added = tokenizer.get_added_tokens_decoder().get(token_id)
    return added is not None and added.special and added.content != "<unk>"


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("piece", [1, 3])
def test_a_text_in_pieces_is_retokenized_as_the_draft_would_write_it(target: str, draft: str, piece: int) -> None:
    written, ids = Written(target, draft), ids_of(FAMILIES[target], TEXT * 3)
    for start in range(0, len(ids), piece):
        written.commit(start, ids[start : start + piece])
    assert told(written.translation, written.retokenization) == ids_of(FAMILIES[draft], bytes_of(target, ids).decode())


def test_texts_are_drafted_where_few_tokens_are_one_in_both() -> None:
    """172 of the target's 477; 298 are not few."""
    assert between("sentencepiece", "byte-level").by_strings
    assert not between("sentencepiece", "sentencepiece without a prefix").by_strings


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_distribution_is_the_draft_s_over_the_tokens_that_both_have(target: str, draft: str) -> None:
    """The probabilities of all ways to write a token in one are summed; all else has none."""
    translation = between(target, draft)
    row = np.random.default_rng(3).normal(size=FAMILIES[draft].get_vocab_size()).astype(np.float32)
    logits = translation.logits(row)
    assert logits.shape == (FAMILIES[target].get_vocab_size() + 5,)
    probs = np.exp(row.astype(np.float64))
    by_text = dict[bytes, float]()
    for token_id, raw in enumerate(spelling(draft)):
        if raw and raw.decode("utf-8", "ignore").encode() == raw:
            by_text[raw] = by_text.get(raw, 0.0) + float(probs[token_id])
    found = {i: raw for i, raw in enumerate(spelling(target)) if logits[i] > -math.inf}
    assert set(found.values()) == by_text.keys() & {raw for raw in spelling(target) if raw}
    assert len(found) == len(set(found.values())) == translation.num_shared
    for token_id, raw in found.items():
        assert raw is not None
        assert math.exp(logits[token_id]) == pytest.approx(by_text[raw], rel=1e-5)
        assert spelling(draft)[translation.draft_id(token_id)] == raw


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_text_of_the_drafts_is_read_as_its_bytes(target: str, draft: str, data: st.DataObject) -> None:
    """Whatever it writes, in tokens of its own that need not be those that its tokenizer would take."""
    translation = between(target, draft)
    committed = ids_of(FAMILIES[target], data.draw(texts))
    committed = committed[: data.draw(st.integers(0, len(committed)))]
    assume(not ends_within(bytes_of(target, committed)))  # there nothing is written
    text = st.builds(lambda text: ids_of(FAMILIES[draft], text), texts)
    own = data.draw(st.one_of(text, st.lists(st.integers(0, FAMILIES[draft].get_vocab_size() - 1), max_size=12)))
    read, has_ended = translation.read(committed, own)
    end = next((place for place, each in enumerate(own) if spelling(draft)[each] is None), len(own))
    assert has_ended or end == len(own)
    found, written = bytes_of(target, read), bytes_of(draft, own[:end])
    assert written.startswith((found, found.removeprefix(b" ")))
    if has_ended and "\ufffd" not in written.decode("utf-8", "replace"):
        assert found in (written, b" " + written)


@pytest.mark.parametrize("draft", ["digits apart", "sentencepiece without a prefix"])
def test_a_text_is_read_as_the_target_continues(draft: str) -> None:
    """But for the last token, with which what follows may merge."""
    whole = ids_of(FAMILIES["byte-level"], TEXT[:160])
    committed, after = whole[:40], bytes_of("byte-level", whole[40:]).decode()
    own = ids_of(FAMILIES[draft], after)
    assert between("byte-level", draft).read(committed, own) == (whole[40:-1], False)


class TestMeetings:
    """Cases in which one family's ways meet another's."""

    def test_spaces_and_newlines_are_their_bytes(self) -> None:
        target, draft = FAMILIES["byte-level"], FAMILIES["sentencepiece"]
        translation = between("byte-level", "sentencepiece")
        words = [each[1:] for each in draft.get_vocab() if each[0] == "▁" and target.token_to_id(f"Ġ{each[1:]}")]
        assert len(words) > 1
        for own, other in (*((f"Ġ{word}", f"▁{word}") for word in words), ("Ċ", "<0x0A>")):
            token_id = target.token_to_id(own)
            assert token_id is not None and draft.token_to_id(other) is not None
            assert math.isfinite(translation.logits(np.zeros(draft.get_vocab_size(), np.float32))[token_id]), own
            assert translation.draft_id(token_id) in (draft.token_to_id(other), draft.token_to_id("\n")), own

    def test_a_byte_and_a_character_of_one_spelling_are_summed(self) -> None:
        """`\\n` is a token and a fallback byte: two ways to say the same, the first of which is fed."""
        target, draft = FAMILIES["byte-level"], FAMILIES["sentencepiece"]
        ids = [draft.token_to_id("a"), draft.token_to_id("<0x61>")]
        row = np.full(draft.get_vocab_size(), -50.0, np.float32)
        row[ids] = np.log([0.5, 0.25])
        translation = between("byte-level", "sentencepiece")
        token_id = target.token_to_id("a")
        assert math.exp(translation.logits(row)[token_id]) == pytest.approx(0.75)
        assert translation.draft_id(token_id) == ids[0]

    def test_special_tokens_never_map_whatever_they_are_called(self) -> None:
        """`<s>` is special to both, `</s>` and `<|im_end|>` to one; a text that holds them is a text."""
        target, draft = FAMILIES["byte-level"], FAMILIES["sentencepiece"]
        translation = between("byte-level", "sentencepiece")
        zeros = np.zeros(draft.get_vocab_size(), np.float32)
        assert translation.logits(zeros)[target.token_to_id("<s>")] == -math.inf
        written = Written("byte-level", "sentencepiece")
        written.commit(0, ids_of(byte_level(special=("<|endoftext|>", "<x>")), "a</s>b"))
        seen = told(translation, written.retokenization)
        assert draft.token_to_id("</s>") not in seen
        assert bytes_of("sentencepiece", seen).strip() == b"a</s>b"

    def test_nothing_merges_across_a_special_token(self) -> None:
        written = Written("byte-level", "digits apart")
        target, draft = FAMILIES["byte-level"], FAMILIES["digits apart"]
        parts: list[list[int]] = [ids_of(target, "re"), [target.token_to_id("<|endoftext|>")], ids_of(target, "st")]
        written.commit(0, [each for part in parts for each in part])
        apart = [*ids_of(draft, "re"), *ids_of(draft, "st")]
        assert told(written.translation, written.retokenization) == apart != ids_of(draft, "rest")

    def test_texts_begin_as_the_drafts_tokenizer_begins_them(self) -> None:
        assert between("byte-level", "sentencepiece").start_ids == (1,)
        assert between("sentencepiece", "digits apart").start_ids == (0,)  # with nothing: its end, as given
        begun = byte_level(special=("<|endoftext|>", "<s>"), begin="<s>")
        sizes = (FAMILIES["sentencepiece"].get_vocab_size(), begun.get_vocab_size())
        assert Intersection(json_of(FAMILIES["sentencepiece"]), json_of(begun), *sizes, (0,)).start_ids == (1,)

    def test_half_a_character_is_not_read_and_a_whole_one_is(self) -> None:
        written = Written("byte-level", "digits apart")
        halves = [FAMILIES["byte-level"].token_to_id(char) for char in "ðŁĺ"]  # the first bytes of an emoji
        before = list(written.retokenization.ids)
        for num in range(1, 4):
            written.commit(num - 1, halves[num - 1 : num])
            assert (written.retokenization.is_whole, written.retokenization.ids) == (False, before)
        written.commit(3, [FAMILIES["byte-level"].token_to_id("Ģ")])
        assert written.retokenization.is_whole
        assert bytes_of("digits apart", told(written.translation, written.retokenization)) == "😀".encode()
        logits = written.translation.logits(np.zeros(FAMILIES["digits apart"].get_vocab_size(), np.float32))
        assert all(logits[each] == -math.inf for each in halves)  # nor is it guessed

    def test_what_follows_merges_with_what_was_there(self) -> None:
        """The draft was told `re`; `st` makes another word of it."""
        written = Written("byte-level", "digits apart")
        target, draft = FAMILIES["byte-level"], FAMILIES["digits apart"]
        written.commit(0, ids_of(target, "self.re"))
        apart = told(written.translation, written.retokenization)
        written.commit(len(written.committed), ids_of(target, "st"))
        seen = told(written.translation, written.retokenization)
        assert seen == ids_of(draft, "self.rest")
        assert seen[: len(apart)] != apart

    def test_a_merge_behind_the_look_behind_is_found(self) -> None:
        """A word of more tokens than are told anew: what is told goes back to where both begin a token."""
        letters = [chr(97 + i) for i in range(26)]
        long = "".join(letters)
        vocab = {"<end>": 0, **{each: 1 + i for i, each in enumerate(letters)}}
        merges = [(long[:i], long[i]) for i in range(1, 26)]
        draft = Tokenizer(models.BPE({**vocab, **{a + b: 27 + i for i, (a, b) in enumerate(merges)}}, merges))
        target = Tokenizer(models.BPE(vocab, []))
        for each in (draft, target):
            each.decoder = byte_level().decoder
            each.add_special_tokens([AddedToken("<end>", special=True)])
        translation = Intersection(json_of(target), json_of(draft), 27, 52, (0,))
        retokenization = translation.retokenization()
        before = "z" * 40
        ids = ids_of(target, before + long)
        retokenization.commit(ids[:40], 0)
        for num in range(41, 67):
            retokenization.commit(ids[:num], num - 1)
            assert retokenization.ids == [0, *ids_of(draft, (before + long)[:num])]
        assert len(retokenization.ids) == 42


def test_padded_logits_are_cut_and_filled_and_nothing_is_fed_again() -> None:
    row = np.arange(4, dtype=np.float32)
    assert PaddedTranslation(6, 4).logits(row).tolist() == [0, 1, 2, 3, -math.inf, -math.inf]
    assert PaddedTranslation(3, 4).logits(row).tolist() == [0, 1, 2]
    retokenization = PaddedTranslation(6, 4).retokenization()
    assert retokenization.commit([1, 2, 5, 3], 0) == 0
    assert retokenization.ids == [1, 2, 0, 3]  # no token has the id 5
    assert retokenization.commit([1, 2, 5, 1, 1], 3) == 3
    assert (retokenization.ids, retokenization.num_ids_within(2), retokenization.is_whole) == ([1, 2, 0, 1, 1], 2, True)
