"""A gateway whose K that adapts follows what was kept as closely as it can, plain rounds among them, whether it pays or
not. No fault of the law: K is chosen before its round is drawn.
"""

import itertools
import sys

from gateway.__main__ import main
from gateway.planning.slot_plan import DraftChoice, SlotPlan
from tests.law.faults import replace

WAIT_S = 10.0
turns = itertools.count()
kept: dict[SlotPlan, int] = {}
"""Draft tokens in the slot's last round, if it had some: two follow where none or two were kept, none elsewhere."""
leave = SlotPlan.leave


def choose(self, room, num_behind, num_left, is_first=False):
    k = min(room, (next(turns) if self not in kept else 2 + 2 * kept.pop(self)) % 4)
    return DraftChoice(k, WAIT_S if k else 0.0)


def verified(self, num_drafted, num_accepted, *others):
    kept[self] = num_accepted


def left(self):
    kept.pop(self, None)
    leave(self)


if __name__ == "__main__":
    for name, value in {"choose": choose, "verified": verified, "leave": left}.items():
        replace(SlotPlan, name, value)
    sys.exit(main(sys.argv[1:]))
