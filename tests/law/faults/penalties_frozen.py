"""A target whose penalties count the committed tokens alone and forget the draft tokens before a position."""

from outrider.engine.sampling.penalties import SamplingState
from tests.law.faults import replace, run_target

edits = SamplingState.edits


def frozen(self, draft_prefix):
    return edits(self, ())


if __name__ == "__main__":
    replace(SamplingState, "edits", frozen)
    run_target()
