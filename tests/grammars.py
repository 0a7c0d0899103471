"""Tokenizers of a few ids for tests of grammars, and what is compiled for them."""

from collections.abc import Sequence

from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.engine.sampling.grammar_state import Grammar, Grammars

WORDS = ("</s>", "<unk>", "1", "2", "[", "]", ",", "11")
"""Enough for lists of numbers, in which 11 can be written in two ways."""
MERGES = (("1", "1"),)
END, ONE, TWO, OPEN, CLOSE, COMMA, ELEVEN = 0, 2, 3, 4, 5, 6, 7

SCHEMA = LLMatcher.grammar_from_json_schema(
    {"type": "array", "items": {"type": "integer"}}, overrides={"whitespace_flexible": False}
)
REGEX = LLMatcher.grammar_from_regex(r"[12]+(,[12]+)*\]?")
CHOICE = LLMatcher.grammar_from_regex(r"1112|12,1|2\[1\]|2,")
"""Behind `2[` and `12` nothing is left to choose."""


def tokenizer_of(
    words: Sequence[str] = WORDS, merges: Sequence[tuple[str, str]] = MERGES, unknown: str | None = None
) -> Tokenizer:
    """Word i has id i; those in angle brackets are special. unknown: the word for what none of them writes."""
    vocab = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words if word[0] == "<"])
    return tokenizer


def grammars_of(
    words: Sequence[str] = WORDS, merges: Sequence[tuple[str, str]] = MERGES, width: int | None = None
) -> Grammars:
    """width: of the logits, where they are wider than the vocabulary."""
    return Grammars(tokenizer_of(words, merges).to_str().encode(), width or len(words), [words.index("</s>")])


def compiled(text: str, grammars: Grammars | None = None) -> Grammar:
    found = (grammars or grammars_of()).compile(text)
    assert found is not None
    return found
