"""Chains drawn from what drafters without a model say: what they are drawn from is what is handed on, and verified
against it the output has the target's law, wherever a drafter stops.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.drafting.lookup import Lookup
from outrider.drafting.ngram import Ngram
from outrider.drafting.sequence_drafter import Follower, SequenceDrafter
from outrider.engine.sampling.acceptance import Noise
from outrider.engine.sampling.count_distribution import distribution_of_counts
from outrider.engine.sampling.coupled import coupled_id
from outrider.engine.sampling.noise import NoiseStream, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.papers.count_tables import Bigram, Unigram
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from tests.unit.outrider.engine.sampling.counted import DRAFTERS, PARAMS, SEQUENCE, VOCAB, K, opened, state_of
from tests.unit.outrider.engine.sampling.test_acceptance_law import (
    TOLERANCE,
    HostBlockRound,
    HostRound,
    emitted_law,
    joint,
    measured_law,
    random_law,
)


def law_at(follower: Follower, state: SamplingState, prefix: tuple[int, ...]) -> TokenDistribution | None:
    """Anew from the end of the sequence."""
    walk = follower.walk()
    for token_id in prefix:
        walk.step(token_id)
    counts = walk.next()
    return None if counts is None else distribution_of_counts(counts, LogitRow(state, prefix), VOCAB)


class Stopping(HostRound):
    """A draft sequence ends where the drafter has nothing to say: the zeros there are not drafts."""

    law: Callable[[tuple[int, ...]], TokenDistribution | None]

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.counts = [next((j for j in range(K) if type(self).law(s[:j]) is None), K) for s in self.sequences]

    def decide_one(self, row: int, noise: Noise) -> tuple[int, int]:
        n = self.counts[row]
        return self.ONE(self.target_laws[row].__getitem__, self.draft_laws[row][:n], self.ids[row, :n].tolist(), noise)

    def next_law(self, n: int) -> Tensor:
        def sample(rows: Tensor, u: Tensor) -> Tensor:
            accept, own = self.noise(len(rows), n)
            own[:, n] = u
            return self.decide(rows, accept, own).next_ids

        return measured_law(sample, len(self.sequences), VOCAB)


class StoppingBlock(Stopping, HostBlockRound):
    pass


EACH = [(name, "penalties") for name in DRAFTERS] + [("bigram", how) for how in PARAMS if how != "penalties"]


@pytest.mark.parametrize("rounds", (Stopping, StoppingBlock))
@pytest.mark.parametrize(("name", "how"), EACH)
def test_the_output_has_the_target_s_distribution(name: str, how: str, rounds: type[Stopping]) -> None:
    follower, state = DRAFTERS[name]().open(SEQUENCE, 6), state_of(PARAMS[how])
    stop = np.array([0.0] + [-np.inf] * (VOCAB - 1), dtype=np.float32)

    def drawn(prefix: tuple[int, ...]) -> Tensor:
        law = law_at(follower, state, prefix)
        return torch.from_numpy(stop if law is None else law.normalised().dense_scores())

    work = type(rounds.__name__, (rounds,), {"law": staticmethod(lambda prefix: law_at(follower, state, prefix))})
    target = random_law(VOCAB, K, seed=1)
    law = emitted_law(target, drawn, VOCAB, K, rounds=work)
    assert float((law - joint(target, VOCAB, K + 1)).abs().max()) < TOLERANCE


def grown(drafter: SequenceDrafter, params: SamplingParams, most: int = K) -> CandidateTree:
    """The chain that the target grows in a slot that has this sequence."""
    own, slot = opened(drafter, params)
    chain = own.candidates(slot, Drafter.NGRAM, state_of(params), SlotAcceptance(RankAcceptance()), most)
    assert chain.tree.is_chain and chain.max_len == most
    return chain


def ids_of(chain: CandidateTree) -> tuple[int, ...]:
    return tuple(chain.tree.ids)


@pytest.mark.parametrize(("name", "how"), EACH)
def test_a_chain_is_drawn_from_the_distributions_that_are_delivered_with_it(name: str, how: str) -> None:
    """Each law is what the drafter says after the ids before it; over seeds, ids come as often as the laws say. Where
    the law leaves no choice its id is a guess, which no draw follows.
    """
    drafter, num_seeds = DRAFTERS[name](), 100
    follower, state = DRAFTERS[name]().open(SEQUENCE, 6), state_of(PARAMS[how])
    found, chains = Counter[tuple[int, ...]](), dict[tuple[int, ...], CandidateTree]()
    for seed in range(num_seeds):
        chain = grown(drafter, dataclasses.replace(PARAMS[how], seed=seed))
        found[ids_of(chain)] += 1
        chains[ids_of(chain)] = chain
    total, chi, cells = 0.0, 0.0, 0
    for ids, chain in chains.items():
        share = 1.0
        for j, (token_id, law) in enumerate(zip(ids, chain.distributions, strict=True)):
            expected = law_at(follower, state, ids[:j])
            assert expected is not None
            if law is None:
                assert expected.support()[0].tolist() == [token_id]
                continue
            assert isinstance(law, TokenDistribution)
            assert np.array_equal(law.dense_scores(), expected.normalised().dense_scores())
            share *= law.prob(token_id)
        after = law_at(follower, state, ids)
        guessed = bool(ids) and chain.distributions[-1] is None
        assert len(ids) == K or after is None or (guessed and after.scores.size > 1)
        total, chi, cells = total + share, chi + (found[ids] - num_seeds * share) ** 2 / (num_seeds * share), cells + 1
    left = num_seeds * (1 - total)  # what never came
    if left > 1e-6:
        chi, cells = chi + left, cells + 1
    assert cells == 1 or stats.chi2.sf(chi, cells - 1) > 1e-6


def test_its_numbers_are_no_drafts() -> None:
    """A chain of a draft's that began at the same length may outlive the step, and goes on with numbers of its own."""
    for seed in range(20):
        params = SamplingParams(seed=seed)
        chain = grown(DRAFTERS["bigram"](), params)
        start, num = len(SEQUENCE), len(chain.tree)
        positions = range(start, start + num)
        (numbers,) = host_slot_uniforms([params] * num, [start] * num, positions, [NoiseStream.OWN_DRAFT])
        for token_id, law, u in zip(chain.tree.ids, chain.distributions, numbers, strict=True):
            assert law is None or (isinstance(law, TokenDistribution) and token_id == law.draw(float(u)))


@pytest.mark.parametrize("how", PARAMS)
def test_draft_tokens_of_a_determined_request_are_ids_alone(how: str) -> None:
    drafter, greedy = Bigram(SEQUENCE), dataclasses.replace(PARAMS[how], temperature=0.0)
    coupled = dataclasses.replace(PARAMS[how], acceptance=AcceptanceRule.COUPLED, seed=7)
    best, picked = grown(drafter, greedy), grown(drafter, coupled)
    assert best.distributions == picked.distributions == [None] * K
    for j in range(K):
        law, warm = (
            law_at(drafter.open(SEQUENCE, 6), state_of(params), ids_of(chain)[:j])
            for params, chain in ((greedy, best), (coupled, picked))
        )
        assert law is not None and warm is not None
        assert best.tree.ids[j] == law.id_of(int(law.scores.argmax()))
        assert picked.tree.ids[j] == coupled_id(warm, coupled, len(SEQUENCE) + j)


def test_a_chain_ends_where_all_that_was_counted_is_banned() -> None:
    drafter = Unigram([2, 2, 1])
    assert not ids_of(grown(drafter, SamplingParams(bad_words=((2,), (1,)))))
    assert ids_of(grown(drafter, SamplingParams(bad_words=((2, 2), (2, 1)), temperature=0.0))) == (2,)


@pytest.mark.parametrize("make", [Ngram, Lookup])
def test_an_output_is_copied_on_from_what_an_encoder_reads(make: Callable[[], SequenceDrafter]) -> None:
    """A message counts the decoder's tokens alone. What is set back is no longer followed."""
    params = SamplingParams(temperature=0.0)
    own, slot = opened(make(), params, source=(2, 0, 2, 2, 1, 0, 1))
    for base_len, ids, expected in ((6, [0, 2, 2], (1, 0, 1)), (7, [2], (2, 1, 0)), (6, [1], ())):
        slot.committed = [*SEQUENCE[:6], *([0] if base_len == 7 else []), *ids]
        own.commit(slot, base_len)
        chain = own.candidates(slot, Drafter.NGRAM, state_of(params), SlotAcceptance(RankAcceptance()), 3)
        assert ids_of(chain)[: len(expected)] == expected
