"""Make the drafters without a model that a worker offers, from its settings, at start."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer

from outrider.drafting import lookup
from outrider.drafting.answer_start import AnswerStart
from outrider.drafting.drafter import SequenceDrafter
from outrider.drafting.ngram import Ngram
from outrider.engine.speculation.growth import OpenAhead
from outrider.engine.speculation.slot_tree import SlotTree
from outrider.papers.beam_drafts import BeamDrafts
from outrider.papers.cascade import CascadeTable
from outrider.papers.tables import Bigram, Unigram
from outrider.wire import kinds
from outrider.wire.errors import ConfigError
from outrider.wire.model_json import parse_object
from outrider.wire.params import SamplingParams
from outrider.wire.tokenizer_json import TOKENIZER_JSON

OF_A_TEXT = (kinds.Drafter.UNIGRAM, kinds.Drafter.BIGRAM)


def make_drafters(
    wanted: Iterable[kinds.Drafter], text: str | None, tokenizer_json: bytes, vocab_size: int
) -> dict[kinds.Drafter, SequenceDrafter]:
    """Return the wanted drafters.

    text: file that unigrams and bigrams are counted in; None when neither of them is wanted. Raises ConfigError naming
    a text that cannot be used.
    """
    ids = () if text is None else text_ids(text, tokenizer_json, vocab_size)
    marks = special_ids(tokenizer_json)
    made: dict[kinds.Drafter, SequenceDrafter] = {}
    for kind in wanted:
        match kind:
            case kinds.Drafter.NGRAM:
                made[kind] = AnswerStart(Ngram(), marks)
            case kinds.Drafter.LOOKUP:
                made[kind] = AnswerStart(lookup.Lookup(lookup.MIN_N, lookup.MAX_N, lookup.CORPUS_TOKENS), marks)
            case kinds.Drafter.UNIGRAM:
                made[kind] = Unigram(ids)
            case kinds.Drafter.BIGRAM:
                made[kind] = Bigram(ids)
            case _:
                raise ValueError(f"{kind} needs a model")
    return made


def special_ids(tokenizer_json: bytes) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens."""
    added = parse_object(tokenizer_json, TOKENIZER_JSON).get("added_tokens") or ()
    return frozenset(token["id"] for token in added if token.get("special"))


def text_ids(path: str, tokenizer_json: bytes, vocab_size: int) -> list[int]:
    """Return the tokens of a UTF-8 file. Raises ConfigError when it is unreadable, empty or not the model's."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"drafter_text is {path!r}, which cannot be read: {error}; give a text file in UTF-8", param="drafter_text"
        ) from None
    ids: list[int] = Tokenizer.from_buffer(tokenizer_json).encode(text, add_special_tokens=False).ids
    if not ids:
        raise ConfigError(
            f"drafter_text is {path!r}, which has no token; give a longer text or leave it out", param="drafter_text"
        )
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"drafter_text is {path!r}, of which the token {max(ids)} is outside the model's {vocab_size}; "
            "tokenizer and model do not belong together",
            param="drafter_text",
        )
    return ids


def growth_of(params: SamplingParams) -> type[SlotTree] | type[BeamDrafts]:
    """Return what grows in the slots of a draft worker."""
    return SlotTree if params.beams is None else BeamDrafts


def rows_ahead(table: SequenceDrafter) -> OpenAhead:
    """Return who opens the rows ahead of a draft worker's slots, as a table fills them."""
    return CascadeTable(table).open
