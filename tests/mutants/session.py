"""One answer: its text, its stop strings, its usage."""

from tests.mutants import Mutant
from tests.mutants.operators import call, constant, drop, never, operation, read, sibling, subscript

TEXT, STATE = "gateway.rounds:Detokenizer", "gateway.rounds:Session"
DETOKENIZER = ("tests/unit/gateway/rounds/test_detokenizer.py",)
VERDICTS = ("tests/unit/gateway/rounds/test_session.py",)

SESSION = (
    Mutant(
        f"{TEXT}.push",
        call("max", "num_matched", to="0"),
        "the beginning of a stop string is sent before it is known that it is one",
        DETOKENIZER,
    ),
    Mutant(f"{TEXT}.push", read("_held", to='""'), "text that was held back is lost", DETOKENIZER),
    Mutant(
        f"{TEXT}.push",
        call("TextUpdate", "_ended", to="_f(_0, len(ids), _2, _3)"),
        "tokens after the one that completed a stop string are counted",
        DETOKENIZER,
    ),
    Mutant(
        f"{TEXT}._first_stop",
        read("max", to="min"),
        "of two stop strings that end together the shorter one stays in part in the text",
        DETOKENIZER,
    ),
    Mutant(
        "gateway.rounds:_StopMatch._extended",
        subscript("_borders", to="0"),
        "a stop string that begins within a false start of itself is missed",
        DETOKENIZER,
    ),
    Mutant(
        f"{TEXT}.finish",
        operation("+", to="_1", nth=(1, 2)),
        "an answer that ends in the middle of what might have been a stop string loses it",
        DETOKENIZER,
    ),
    Mutant(
        f"{TEXT}._add", operation("+", to="_1", nth=(2, 2)), "a character that never became whole vanishes", DETOKENIZER
    ),
    Mutant(f"{STATE}.apply", never("keeps_stop"), "the stop token shows in the text", VERDICTS),
    Mutant(
        f"{STATE}.apply",
        subscript("num_kept", to="_0"),
        "tokens after a stop string are committed and counted",
        VERDICTS,
    ),
    Mutant(
        f"{STATE}.max_draft_tokens", constant(1, to="0"), "a round drafts a token that can never be committed", VERDICTS
    ),
    Mutant(f"{STATE}.apply", drop("+="), "the last characters of an answer are missing", VERDICTS),
    Mutant(f"{STATE}._count", sibling("num_accepted", "num_drafted"), "usage says that every draft was kept", VERDICTS),
)
