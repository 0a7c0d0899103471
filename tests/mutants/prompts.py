"""Log-probs of prompts: by which row, from which token on, and of what the cache has."""

from tests.mutants import Mutant
from tests.mutants.operators import call, never, subscript

TARGET, UNIT = ("tests/service/test_target_service.py",), ("tests/unit/outrider/engine/worker/test_scheduler.py",)

PROMPTS = (
    Mutant(
        "target_service:note_scores",
        subscript("committed", to="_0[_1 - 1 : _2 - 1]"),
        "a token is scored by the logits behind itself",
        TARGET,
    ),
    Mutant(
        "outrider.engine.worker:Slot.adopt",
        never("num_unscored"),
        "what the prefix cache has is passed over, and never scored",
        (*UNIT, *TARGET),
    ),
    Mutant(
        "outrider.engine.worker:Slot.max_narrow_tokens",
        never(),
        "the end of a prompt rides along in its first step, unscored",
        (*UNIT, *TARGET),
    ),
    Mutant(
        "target_service:note_scores",
        call("min", to="_0"),
        "output of a slot that is opened again is taken for its prompt",
        TARGET,
    ),
)
