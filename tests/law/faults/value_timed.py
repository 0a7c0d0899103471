"""A draft that takes a time set by the token that it has just drawn, and pushed, before it draws the next. No fault of
the law: whether a token is verified depends on the tokens before it. Only who takes a proposal when it is whole lets
the first token decide on itself.
"""

import time

from draft_service.growing import pushing
from draft_service.growing.grower import Grower
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.growing_tree import GrowingTree
from outrider.engine.speculation.nodes import NodeKind
from tests.law.faults import replace, run_draft

DELAY_S = 0.6
"""Twice what the target waits that this draft is tested with."""

add_child, offers, next_wake = GrowingTree.add_child, GrowingTree.candidates, Grower.next_wake


def add_timed(self, parent, token_id, kind, distribution=None):

    node = add_child(self, parent, token_id, kind, distribution)
    if kind is NodeKind.SAMPLED:
        self.__dict__.setdefault("from_s", {})[_key(self, node)] = time.monotonic() + DELAY_S * (token_id % 2)
    return node


def offers_in_time(self, max_num):
    from_s, now = self.__dict__.get("from_s", {}), time.monotonic()
    return [(prob, node) for prob, node in offers(self, max_num) if from_s.get(_key(self, node), 0) < now]


def _key(self, node):
    """Return what stays the same of a node when tokens are committed; None for ROOT, which is always in time."""
    position = self.committed_len + self.depth(node)
    return None if node == ROOT else (position, self.segments.get(node), self.ids[node])


def wake_soon(self):
    soon = time.monotonic() + 0.005
    return min(soon, next_wake(self) or soon)


if __name__ == "__main__":
    replace(GrowingTree, "add_child", add_timed)
    replace(GrowingTree, "candidates", offers_in_time)
    replace(Grower, "next_wake", wake_soon)
    replace(pushing, "PUSH_S", 0.0)
    run_draft()
