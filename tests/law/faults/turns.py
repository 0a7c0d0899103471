"""A target that verifies now so many drafts, now so many, now of this drafter, now of that, whoever promises more.
No fault of the law: who drafts, and how much, is chosen before anything is looked at.
"""

import itertools

from outrider.drafting.ngram import NgramFollower
from target_service.drafting.budget import VerifyBudget
from target_service.drafting.slot_candidates import Candidates
from tests.law.faults import adaptive, replace, run_target

turns = itertools.count()


def num_expected(self):
    return next(turns) % 3 if self.budget_items else -1


def has_next(self):
    """Also after one token that came before."""
    return self.walk().next() is not None


if __name__ == "__main__":
    replace(VerifyBudget, "choose", adaptive.choose)
    replace(VerifyBudget, "hold_until", adaptive.hold_until)
    replace(NgramFollower, "has_next", has_next)
    replace(Candidates, "num_expected", property(num_expected))
    run_target()
