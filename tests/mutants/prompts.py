"""Log-probs of prompts: by which row, from which token on, and of what the cache has."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import call, never, subscript

TARGET, UNIT = ("tests/service/test_target_service.py",), ("tests/unit/outrider/engine/worker/test_scheduler.py",)

PROMPTS: Faults = {
    TARGET: {
        "a token is scored by the logits behind itself": Fault(
            "target_service:note_scores", subscript("committed", to="_0[_1 - 1 : _2 - 1]")
        ),
        "output of a slot that is opened again is taken for its prompt": Fault(
            "target_service:note_scores", call("min", to="_0")
        ),
    },
    (*UNIT, *TARGET): {
        "what the prefix cache has is passed over, and never scored": Fault(
            "outrider.engine.worker:Slot.adopt", never("num_unscored")
        ),
        "the end of a prompt rides along in its first step, unscored": Fault(
            "outrider.engine.worker:Slot.max_narrow_tokens", never()
        ),
    },
}
