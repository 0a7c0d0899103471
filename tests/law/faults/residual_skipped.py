"""A target that replaces a rejected draft by a draw from its own law instead of the set_residual."""

from outrider.engine.sampling import acceptance
from tests.law.faults import replace, run_target
from tests.law.faults.by_token import decide_by_token

if __name__ == "__main__":
    decide_by_token()
    replace(acceptance, "set_residual", lambda target_probs, draft_probs: target_probs)
    run_target()
