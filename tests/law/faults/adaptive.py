"""A target that verifies now so many drafts, now so many, none among them, whether it pays or not.
No fault of the law: how many are verified is chosen before they are looked at.
"""

import itertools

from target_service.drafting.budget import VerifyBudget, VerifyChoice
from tests.law.faults import replace, run_target

turns = itertools.count()


def choose(self, demands, max_rows, max_extra_rows, absent):
    return [VerifyChoice(min(len(each.probs), next(turns) % 4), False) for each in demands]


def hold_until(self, awaited, now):
    """SkipSlot for a guess at two of three lengths, whatever it costs."""
    until = [lease.ready_s + 0.2 for lease, *_ in awaited if len(lease.slot.committed) % 3]
    return max((each for each in until if now < each), default=None)


if __name__ == "__main__":
    replace(VerifyBudget, "choose", choose)
    replace(VerifyBudget, "hold_until", hold_until)
    run_target()
