"""Create the drafters without a network of their own that a worker offers, from its settings, when it starts.

Called by the loaders of the target and draft services. It is the only module that imports the methods of
`outrider.papers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from outrider.drafting import lookup
from outrider.drafting.answer_start import AnswerStart
from outrider.drafting.ngram import Ngram
from outrider.drafting.sequence_drafter import SequenceDrafter
from outrider.engine.speculation.followers import TableDrafter
from outrider.engine.speculation.growing_tree import GrowingTree
from outrider.engine.speculation.growth import OpenAhead
from outrider.engine.speculation.target_drafter import TargetDrafter
from outrider.papers.beam_drafts import BeamDrafts
from outrider.papers.beam_growth import BeamGrowth
from outrider.papers.cascade import open_cascade
from outrider.papers.count_tables import Bigram, Unigram
from outrider.papers.lookahead import LookaheadDrafter
from outrider.papers.merging import merge as merge  # the targets take it from here
from outrider.papers.pass_drafter import PassDrafter
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_json import parse_object
from outrider.wire.models.tokenizer_json import TOKENIZER_JSON
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import TargetConfig

if TYPE_CHECKING:
    from outrider.engine.model_runner import ModelRunner

TEXT_TABLES: dict[Drafter, Callable[[Sequence[int]], SequenceDrafter]] = {
    Drafter.UNIGRAM: Unigram,
    Drafter.BIGRAM: Bigram,
}
"""Drafters that count their n-gram table once, in a fixed text. Each maps to its class, which is created from the token
ids of the text."""
SearchDrafts = BeamDrafts
"""Class that holds the draft tokens of a beam search in the target."""


def target_drafters(config: TargetConfig, runner: ModelRunner, tokenizer_json: bytes) -> dict[Drafter, TargetDrafter]:
    """Create the target's own drafters and return them by kind: n-grams, lookup, the prediction, and, where the model
    and the settings allow them, unigrams, bigrams, lookahead and `pass` (look-ahead embeddings). A head's drafter is
    not among them.

    Raises ConfigError if a setting of a drafter cannot be used.
    """
    vocab_size = runner.facts.vocab_size
    kinds_of_tables = [Drafter.NGRAM, Drafter.LOOKUP]
    if config.drafter_text:
        kinds_of_tables += TEXT_TABLES
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
    kinds: Iterable[Drafter], text: str | None, tokenizer_json: bytes, vocab_size: int
) -> dict[Drafter, SequenceDrafter]:
    """Create the drafters of these kinds, which must need no model: n-grams, lookup, unigrams and bigrams. Return them
    by kind.

    text: path of the file in which unigrams and bigrams are counted; may be None if `kinds` has neither. vocab_size:
    the target's. Raises ConfigError for a text that cannot be used, and ValueError for a kind that needs a model.
    """
    ids: Sequence[int] = ()
    if text is not None:
        ids = text_ids(text, tokenizer_json, vocab_size)
    marks = special_ids(tokenizer_json)
    made: dict[Drafter, SequenceDrafter] = {}
    for kind in kinds:
        match kind:
            case Drafter.NGRAM:
                made[kind] = AnswerStart(Ngram(), marks)
            case Drafter.LOOKUP:
                made[kind] = AnswerStart(lookup.Lookup(lookup.MIN_N, lookup.MAX_N, lookup.CORPUS_TOKENS), marks)
            case Drafter.UNIGRAM | Drafter.BIGRAM:
                made[kind] = TEXT_TABLES[kind](ids)
            case _:
                raise ValueError(f"{kind} needs a model")
    return made


def special_ids(tokenizer_json: bytes) -> frozenset[int]:
    """Return the token ids of the special tokens that a tokenizer.json lists. tokenizer_json: its content."""
    added = parse_object(tokenizer_json, TOKENIZER_JSON).get("added_tokens") or ()
    return frozenset(token["id"] for token in added if token.get("special"))


def text_ids(path: str, tokenizer_json: bytes, vocab_size: int) -> list[int]:
    """Return the token ids of a text file in UTF-8. path: path of the file, the value of the setting drafter_text.

    Raises ConfigError if the file cannot be read or has no token, or if one of its token ids is outside the vocabulary.
    """
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


def draft_tree_class(params: SamplingParams) -> type[GrowingTree] | type[BeamGrowth]:
    """Return the class of a draft slot's draft tree for a request with these parameters: `BeamGrowth` for a beam
    search, else `GrowingTree`.
    """
    if params.beams is None:
        return GrowingTree
    return BeamGrowth


def lookahead_rows_of(table: SequenceDrafter) -> OpenAhead:
    """Return the function that creates the look-ahead rows of a draft slot. A look-ahead row is a token that `table`
    predicts after a node of the draft tree. It is fed in the same forward as the node, before the node's children are
    drawn.
    """
    return partial(open_cascade, table, {})
