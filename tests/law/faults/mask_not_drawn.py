"""A draft that draws without the grammar and ships its laws masked, with the drawn token in them: the mask is on the
target alone.

Without the drawn token the target would notice: it refuses a token without mass in its own row.
"""

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation import drawing
from tests.law.faults import replace, run_draft

draw, allowed = drawing._draw, SamplingState.allowed


def draw_and_mask(tree, said, whole, numbers):
    draw(tree, said, whole, numbers)
    mask = allowed(said.state, tree.prefix(said.node))
    for child in tree.children(said.node):
        if child in tree.distributions and mask is not None:
            tree.distributions[child] = masked(tree.distributions[child], mask, tree.ids[child])


def masked(law, mask, token_id):
    """The law over what the grammar allows and token_id."""
    ids, scores = law.support()
    kept = mask[ids] | (ids == token_id)
    return TokenDistribution(law.vocab_size, scores[kept], ids[kept]).normalised()


if __name__ == "__main__":
    replace(drawing, "_draw", draw_and_mask)
    replace(SamplingState, "allowed", lambda self, prefix: None)
    run_draft()
