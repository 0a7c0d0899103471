"""A target that verifies a proposal only when all of it has come."""

from target_service.drafting.draft_chooser import DraftChooser
from target_service.drafting.slot_candidates import Candidates
from tests.law.faults import replace, run_target

candidates = DraftChooser.candidates


def whole(self, lease):
    found = candidates(self, lease)
    num_named = min(lease.speculation.num_draft_tokens, lease.max_depth)
    num_here = sum(len(own.tree) for own in found.trees.values())
    return found if num_here >= num_named else Candidates(lease)


if __name__ == "__main__":
    replace(DraftChooser, "candidates", whole)
    run_target()
