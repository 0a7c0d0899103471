"""The table of drafters: makes those that a worker offers, from its settings, at start. Nothing else imports the
methods of `outrider.papers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from outrider.drafting import lookup
from outrider.drafting.answer_start import AnswerStart
from outrider.drafting.drafter import SequenceDrafter
from outrider.drafting.ngram import Ngram
from outrider.engine.speculation.followers import TableDrafter
from outrider.engine.speculation.growth import OpenAhead
from outrider.engine.speculation.target_drafter import TargetDrafter
from outrider.engine.speculation.tree import GrowingTree
from outrider.papers.beam_drafts import BeamDrafts
from outrider.papers.beam_growth import BeamGrowth
from outrider.papers.cascade import open_cascade
from outrider.papers.lookahead import LookaheadDrafter
from outrider.papers.lookahead_embeddings import PassDrafter
from outrider.papers.merging import merge as merge
from outrider.papers.tables import Bigram, Unigram
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_json import parse_object
from outrider.wire.models.tokenizer_json import TOKENIZER_JSON
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import TargetConfig

if TYPE_CHECKING:
    from outrider.engine.model_runner import ModelRunner

OF_TEXT: dict[Drafter, Callable[[Sequence[int]], SequenceDrafter]] = {
    Drafter.UNIGRAM: Unigram,
    Drafter.BIGRAM: Bigram,
}
"""Tables that are counted in a text."""
SearchDrafts = BeamDrafts
"""Holds the draft tokens of a beam search in the target."""


def target_drafters(config: TargetConfig, runner: ModelRunner, tokenizer_json: bytes) -> dict[Drafter, TargetDrafter]:
    """Return the drafters of a target that need no head. Raises ConfigError."""
    vocab_size = runner.facts.vocab_size
    kinds_of_tables = [Drafter.NGRAM, Drafter.LOOKUP]
    if config.drafter_text:
        kinds_of_tables += OF_TEXT
    tables = make_drafters(kinds_of_tables, config.drafter_text, tokenizer_json, vocab_size)
    made: dict[Drafter, TargetDrafter] = {}
    for kind, table in tables.items():
        made[kind] = TableDrafter(table, vocab_size)
    made[Drafter.PREDICTION] = TableDrafter(None, vocab_size)
    if runner.supports_trees:
        made[Drafter.LOOKAHEAD] = LookaheadDrafter(config.lookahead, runner.facts.context_limit)
    if config.lookahead_embeddings is not None:
        made[Drafter.PASS] = PassDrafter.of(config.lookahead_embeddings, runner)
    return made


def make_drafters(
    wanted: Iterable[Drafter], text: str | None, tokenizer_json: bytes, vocab_size: int
) -> dict[Drafter, SequenceDrafter]:
    """Return the wanted drafters.

    text: file that unigrams and bigrams are counted in; None when neither of them is wanted. Raises ConfigError naming
    a text that cannot be used.
    """
    ids = () if text is None else text_ids(text, tokenizer_json, vocab_size)
    marks = special_ids(tokenizer_json)
    made: dict[Drafter, SequenceDrafter] = {}
    for kind in wanted:
        match kind:
            case Drafter.NGRAM:
                made[kind] = AnswerStart(Ngram(), marks)
            case Drafter.LOOKUP:
                made[kind] = AnswerStart(lookup.Lookup(lookup.MIN_N, lookup.MAX_N, lookup.CORPUS_TOKENS), marks)
            case Drafter.UNIGRAM | Drafter.BIGRAM:
                made[kind] = OF_TEXT[kind](ids)
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


def growth_of(params: SamplingParams) -> type[GrowingTree] | type[BeamGrowth]:
    """Return what grows in the slots of a draft worker."""
    return GrowingTree if params.beams is None else BeamGrowth


def rows_ahead(table: SequenceDrafter) -> OpenAhead:
    """Return who opens the rows ahead of a draft worker's slots, as a table fills them."""
    return partial(open_cascade, table, {})
