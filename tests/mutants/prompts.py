"""Log-probs of prompts: by which row, from which token on, and of what the cache has."""

from tests.mutants import Mutant

SCORES, SLOTS = "target_service/prompt_scores.py", "outrider/engine/worker/slots.py"
TARGET, UNIT = ("tests/service/test_target_service.py",), ("tests/unit/test_slots.py",)

PROMPTS = (
    Mutant(
        SCORES,
        "ids = slot.committed[first : first + min(len(own), slot.num_unscored)]",
        "ids = slot.committed[first - 1 : first - 1 + min(len(own), slot.num_unscored)]",
        "a token is scored by the logits behind itself",
        TARGET,
    ),
    Mutant(
        SLOTS,
        "end = self.first + len(self.scoring.found) if self.scoring is not None and self.num_unscored else -1",
        "end = -1",
        "what the prefix cache has is passed over, and never scored",
        (*UNIT, *TARGET),
    ),
    Mutant(
        SLOTS,
        "return 1 if self.num_unscored else MAX_NARROW",
        "return MAX_NARROW",
        "the end of a prompt rides along in its first step, unscored",
        (*UNIT, *TARGET),
    ),
    Mutant(
        SCORES,
        "ids = slot.committed[first : first + min(len(own), slot.num_unscored)]",
        "ids = slot.committed[first : first + len(own)]",
        "output of a slot that is opened again is taken for its prompt",
        TARGET,
    ),
)
