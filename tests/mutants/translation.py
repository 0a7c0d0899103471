"""Drafts of other tokenizers: what is told of the target's tokens, and what of the draft's law is read as theirs."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import always, comparison, drop, read, sibling, subscript

TRANSLATION, SLOT = "outrider.drafting:Intersection", "draft_service:TranslatedSlot"
UNIT = ("tests/unit/outrider/drafting/test_translation.py",)
ENGINE = ("tests/unit/draft_service/slots/test_translated_slot.py",)

TRANSLATIONS: Faults = {
    UNIT: {
        "a place within a character is taken for one where tokens of both begin": Fault(
            f"{TRANSLATION}._retokenize_run", comparison("<=", to="True")
        ),
        "a text that goes on is told as one that begins": Fault(
            "outrider.drafting:_RetokenizedText.commit", always("not")
        ),
        "halves of characters are guessed, and what follows them is told otherwise": Fault(
            "outrider.drafting:_by_text", always("_is_whole")
        ),
        "of a text that the draft writes in two ways one is left out": Fault(
            f"{TRANSLATION}.logits", sibling("logaddexp", "maximum")
        ),
        "a text that spells a special token of the draft's is one": Fault(
            "outrider.drafting:piece_tokenizer", drop("encode_special_tokens")
        ),
        "text before a special token is not told": Fault(
            f"{TRANSLATION}.retokenize", drop("_retokenize_run", nth=(1, 2))
        ),
        "of a text that goes on the last token is guessed, with which what follows merges": Fault(
            f"{TRANSLATION}.read", subscript("1", to="_0")
        ),
        "text that merges with what is committed is guessed without its beginning": Fault(
            "outrider.drafting:index_at", comparison("<=", to="True")
        ),
        "special tokens of one name are one text": Fault("outrider.drafting:read_spelling", drop("continue")),
    },
    ENGINE: {
        "guesses below tokens that the draft writes otherwise go on from a text that it does not have": Fault(
            "draft_service:ModelDrafter.keep_fed", always("is_cache_committed")
        ),
        "the draft guesses what follows half a character without knowing it": Fault(f"{SLOT}.max_depth", always()),
        "a text that is longer in the draft's tokens than its context ends its worker's step": Fault(
            f"{SLOT}.ids", always()
        ),
        "what was cached before it was told otherwise is taken for what is told now": Fault(
            f"{SLOT}.commit_from", read("min", to="max")
        ),
    },
}
