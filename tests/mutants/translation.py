"""Drafts of other tokenizers: what is told of the target's tokens, and what of the draft's law is read as theirs."""

from tests.mutants import Mutant
from tests.mutants.operators import always, comparison, drop, read, sibling, subscript

TRANSLATION, SLOT = "outrider.drafting:Intersection", "draft_service:TranslatedSlot"
UNIT = ("tests/unit/outrider/drafting/test_translation.py",)
ENGINE = ("tests/unit/draft_service/slots/test_translated_slot.py",)

TRANSLATIONS = (
    Mutant(
        f"{TRANSLATION}._retokenize_run",
        comparison("<=", to="True"),
        "a place within a character is taken for one where tokens of both begin",
        UNIT,
    ),
    Mutant(
        "outrider.drafting:_RetokenizedText.commit",
        always("not"),
        "a text that goes on is told as one that begins",
        UNIT,
    ),
    Mutant(
        "outrider.drafting:_by_text",
        always("_is_whole"),
        "halves of characters are guessed, and what follows them is told otherwise",
        UNIT,
    ),
    Mutant(
        f"{TRANSLATION}.logits",
        sibling("logaddexp", "maximum"),
        "of a text that the draft writes in two ways one is left out",
        UNIT,
    ),
    Mutant(
        "outrider.drafting:piece_tokenizer",
        drop("encode_special_tokens"),
        "a text that spells a special token of the draft's is one",
        UNIT,
    ),
    Mutant(
        f"{TRANSLATION}.retokenize",
        drop("_retokenize_run", nth=(1, 2)),
        "text before a special token is not told",
        UNIT,
    ),
    Mutant(
        f"{TRANSLATION}.read",
        subscript("1", to="_0"),
        "of a text that goes on the last token is guessed, with which what follows merges",
        UNIT,
    ),
    Mutant(
        "outrider.drafting:index_at",
        comparison("<=", to="True"),
        "text that merges with what is committed is guessed without its beginning",
        UNIT,
    ),
    Mutant("outrider.drafting:read_spelling", drop("continue"), "special tokens of one name are one text", UNIT),
    Mutant(
        "draft_service:ModelDrafter.keep_fed",
        always("is_cache_committed"),
        "guesses below tokens that the draft writes otherwise go on from a text that it does not have",
        ENGINE,
    ),
    Mutant(f"{SLOT}.max_depth", always(), "the draft guesses what follows half a character without knowing it", ENGINE),
    Mutant(
        f"{SLOT}.ids",
        always(),
        "a text that is longer in the draft's tokens than its context ends its worker's step",
        ENGINE,
    ),
    Mutant(
        f"{SLOT}.commit_from",
        read("min", to="max"),
        "what was cached before it was told otherwise is taken for what is told now",
        ENGINE,
    ),
)
