"""A study of a pair whose speed is known."""

import functools
import random

from outrider.client import Drafter
from outrider.lab.tuning.choice import choose
from outrider.lab.tuning.costs import costs_of
from outrider.lab.tuning.settings import chain_name, compared_drafters
from outrider.lab.tuning.study import Study, acceptance_probability, points_of
from tests.unit.outrider.lab.tuning.simulated_pair import MAX_TOKENS, moods, one_pass

EVERY_K = range(13)


def pair_texts(seed: int, count: int = 8) -> list[list[bool]]:
    draws = random.Random(seed)
    return [moods(draws) for _ in range(count)]


@functools.cache
def studied(*, faster_alone: bool = False, fastest: str = "K = 4, lookup+model") -> Study:
    """At temperature 1, of texts whose drafts are right or never right."""
    texts = [[False] * MAX_TOKENS] * 4 if faster_alone else pair_texts(8, 8)
    passes = {k: [one_pass(k, texts)] * 2 for k in EVERY_K}
    costs = costs_of(passes, MAX_TOKENS)
    alpha = acceptance_probability(passes[12])
    speeds = {chain_name(k): [passes[k][0].tokens_per_s] * 2 for k in (0, 4)}
    speeds[fastest] = [1.1 * speed for speed in speeds["K = 4"]]
    options = compared_drafters(4, 12, 1.0, [Drafter.MODEL, Drafter.NGRAM, Drafter("lookup+model")])
    refused = {"K = 4, unigram": "no such thing"}
    return Study(1.0, alpha, costs, points_of(passes, alpha, costs.c), speeds, options, refused, choose(speeds))
