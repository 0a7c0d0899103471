"""One answer: its text, its stop strings, its usage."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import call, constant, drop, never, operation, read, sibling, subscript

TEXT, STATE = "gateway.rounds:Detokenizer", "gateway.rounds:Session"
DETOKENIZER = ("tests/unit/gateway/rounds/test_detokenizer.py",)
VERDICTS = ("tests/unit/gateway/rounds/test_session.py",)

SESSION: Faults = {
    DETOKENIZER: {
        "the beginning of a stop string is sent before it is known that it is one": Fault(
            f"{TEXT}.push", call("max", "num_matched", to="0")
        ),
        "text that was held back is lost": Fault(f"{TEXT}.push", read("_held", to='""')),
        "tokens after the one that completed a stop string are counted": Fault(
            f"{TEXT}.push", call("TextUpdate", "_ended", to="_f(_0, len(ids), _2, _3)")
        ),
        "of two stop strings that end together the shorter one stays in part in the text": Fault(
            f"{TEXT}._first_stop", read("max", to="min")
        ),
        "a stop string that begins within a false start of itself is missed": Fault(
            "gateway.rounds:_StopMatch._extended", subscript("_borders", to="0")
        ),
        "an answer that ends in the middle of what might have been a stop string loses it": Fault(
            f"{TEXT}.finish", operation("+", to="_1", nth=(1, 2))
        ),
        "a character that never became whole vanishes": Fault(f"{TEXT}._add", operation("+", to="_1", nth=(2, 2))),
    },
    VERDICTS: {
        "the stop token shows in the text": Fault(f"{STATE}.apply", never("keeps_stop")),
        "tokens after a stop string are committed and counted": Fault(f"{STATE}.apply", subscript("num_kept", to="_0")),
        "a round drafts a token that can never be committed": Fault(f"{STATE}.max_draft_tokens", constant(1, to="0")),
        "the last characters of an answer are missing": Fault(f"{STATE}.apply", drop("+=")),
        "usage says that every draft was kept": Fault(f"{STATE}._count", sibling("num_accepted", "num_drafted")),
    },
}
