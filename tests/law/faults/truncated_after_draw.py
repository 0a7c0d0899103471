"""A draft that draws from its whole distribution and then ships it cut to the n best tokens and the drawn one.

With the drawn token cut as well, the target would notice: it refuses a token without mass in its own row.
"""

import numpy as np

from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation import drawing
from outrider.engine.speculation.growing_tree import GrowingTree
from tests.law.faults import replace, run_draft

add_child = GrowingTree.add_child


def add_cut(self, parent, token_id, kind, distribution=None):
    if distribution is not None and self.topk is not None:
        distribution = cut(distribution, self.topk, token_id)
    return add_child(self, parent, token_id, kind, distribution)


def cut(distribution, n, token_id):
    """The distribution over its n best and token_id."""
    ids, scores = distribution.support()
    kept = (scores >= np.sort(scores)[-n:][0]) | (ids == token_id)
    return TokenDistribution(distribution.vocab_size, scores[kept], ids[kept]).normalised()


if __name__ == "__main__":
    replace(drawing, "truncate_topk", lambda distribution, n: distribution)
    replace(GrowingTree, "add_child", add_cut)
    run_draft()
