"""A draft that is fed all that its table guesses, whether it pays or not.

No fault of the law: how much is fed is chosen before anything is drawn.
"""

from draft_service.growing.node_scheduler import NodeScheduler
from tests.law.faults import replace, run_draft


def best(self, offers):
    return list(offers)


if __name__ == "__main__":
    replace(NodeScheduler, "_best", best)
    run_draft()
