"""The target's own noise: its numbers, the token that they pick, and its law. By computation alone."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from outrider.engine.native.library import library
from outrider.engine.sampling import coupled
from outrider.engine.sampling.coupled import (
    coupled_id,
    coupled_index,
    coupled_ranked,
    device_keys,
    fixed_log,
    gumbels_of,
    pick,
    uniforms,
)
from outrider.engine.sampling.noise import NoiseStream, host_uniforms
from outrider.engine.sampling.token_distribution import EmptyDistribution, TokenDistribution
from tests.coupled_bits import (
    SEEDS,
    check_ids,
    check_logarithm,
    check_noise,
    logarithm_arguments,
    params_of,
    random_law,
)
from tests.native import skip_without_library


class TestNoise:
    def test_it_is_a_function_of_seed_choice_position_and_id(self) -> None:
        made = {
            float(uniforms(params_of(seed, choice), position, 6)[token_id])
            for seed in SEEDS
            for choice in (0, 1, 127)
            for position in (0, 1, 70_000)
            for token_id in range(6)
        }
        assert len(made) == len(SEEDS) * 3 * 3 * 6

    def test_nobody_else_has_it(self) -> None:
        """The other purposes at the same place are other numbers."""
        own = uniforms(params_of(), 9, 100)
        seed, choice, position = (np.array([value], dtype=np.uint64) for value in (7, 0, 9))
        others = [
            host_uniforms(seed, choice, position, purpose)[0]
            for purpose in NoiseStream
            if purpose is not NoiseStream.TARGET
        ]
        assert not set(others) & set(own)

    @pytest.mark.parametrize("size", (1, 2, 31, 64, 65, 4097))
    def test_some_ids_have_the_numbers_that_all_have(self, size: int) -> None:
        every = uniforms(params_of(2**63 + 1, 3), 2**31, size)
        some = np.flatnonzero(np.random.default_rng(size).random(size) < 0.3)
        assert (uniforms(params_of(2**63 + 1, 3), 2**31, some) == every[some]).all()

    @pytest.mark.parametrize("seed", SEEDS)
    def test_cpp_and_torch_make_the_same_bits(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        skip_without_library()
        library()
        ids = np.array([0, 3, 4, 77, 128_000, 2**31 - 1])
        native = [uniforms(params_of(seed, 127), 123, of) for of in (4097, ids)]
        monkeypatch.setattr(coupled, "loaded", lambda: None)
        for made, of in zip(native, (4097, ids), strict=True):
            assert (made == uniforms(params_of(seed, 127), 123, of)).all()

    def test_a_device_makes_the_same_bits(self) -> None:
        check_noise("cpu")

    def test_the_logarithm(self) -> None:
        x = logarithm_arguments()
        error = np.abs(fixed_log(x) - np.log(x)) / np.maximum(np.abs(np.log(x)), 1e-300)
        assert error.max() < 1e-15
        check_logarithm("cpu")


@pytest.fixture(params=("c++", "numpy"))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for what may win."""
    if request.param == "c++":
        skip_without_library()
        library()
    else:
        monkeypatch.setattr(coupled, "loaded", lambda: None)


@pytest.mark.usefixtures("way")
class TestToken:
    def test_the_largest_score_plus_noise(self) -> None:
        """Whatever is skipped on the way to it."""
        rng = np.random.default_rng(1)
        for position in range(2_000):
            law = random_law(rng, int(rng.integers(1, 200)), float(rng.choice([0.01, 1.0, 30.0])))
            if position % 3 == 0:  # with holes
                law.scores[rng.random(law.scores.size) < 0.5] = -math.inf
                law.scores[rng.integers(law.scores.size)] = 0.0
            every = law.scores + gumbels_of(uniforms(params_of(), position, law.scores.size))
            assert coupled_id(law, params_of(), position) == every.argmax()
            likeliest = [int(place) for place in np.argsort(-every)[:4] if every[place] > -math.inf]
            assert coupled_ranked(law, params_of(), position, 4)[0] == likeliest

    def test_a_device_gives_what_the_host_gives(self) -> None:
        check_ids("cpu")

    def test_by_weights_host_and_device_pick_the_same(self) -> None:
        """Weights need not sum to 1, and of some ids there are none: as what is left after a rejection."""
        rng, cpu = np.random.default_rng(6), torch.device("cpu")
        for position in range(500):
            weights = 10.0 ** rng.uniform(-9, 3) * np.exp(3 * rng.normal(size=60))
            weights[rng.random(60) < 0.4] = 0.0
            weights[rng.integers(60)] = 1.0
            every = coupled_index(weights, None, params_of(), position)
            keys = device_keys([params_of()], [position], cpu)
            assert pick(torch.from_numpy(weights)[None].log(), keys).tolist() == [every]
            ids = np.flatnonzero(weights)
            assert ids[coupled_index(weights[ids], ids, params_of(), position)] == every

    def test_nothing_to_draw(self) -> None:
        for score in (-math.inf, math.nan):
            with pytest.raises(EmptyDistribution):
                coupled_id(TokenDistribution(3, np.full(3, score, dtype=np.float32)), params_of(), 1)
            with pytest.raises(EmptyDistribution):
                coupled_index(np.exp(np.full(3, score)), None, params_of(), 1)


class TestLaw:
    """By whichever way there is here: both pick the same, as above."""

    def test_by_weights_it_has_their_distribution(self) -> None:
        weights, ids = np.array([3.0, 0.0, 0.5, 1.0, 2.0]), np.array([1, 4, 5, 8, 10])
        drawn = Counter(coupled_index(weights, ids, params_of(), position) for position in range(12_000))
        assert not drawn.pop(1, 0)
        found = [drawn[place] for place in (0, 2, 3, 4)]
        assert chisquare(found, 12_000 * weights[weights > 0] / weights.sum()).pvalue > 1e-4

    @pytest.mark.parametrize("vary", ("position", "seed", "choice"))
    def test_it_has_the_distribution(self, vary: str) -> None:
        law = random_law(np.random.default_rng(4), 7, 1.0)
        drawn: Counter[int] = Counter()
        for i in range(12_700):
            seed, choice = (i // 127, i % 127) if vary == "choice" else (i if vary == "seed" else 0, 0)
            drawn[coupled_id(law, params_of(seed, choice), i if vary == "position" else 50)] += 1
        expected = 12_700 * law.probs()
        assert chisquare([drawn[i] for i in range(7)], expected).pvalue > 1e-4

    def test_draft_and_target_agree_as_often_as_is_promised(self) -> None:
        """At least (1 - TV) / (1 + TV), at most 1 - TV."""
        rng = np.random.default_rng(5)
        target, draft = random_law(rng, 50), random_law(rng, 50)
        draft = TokenDistribution(50, np.float32(0.7) * target.scores + np.float32(0.3) * draft.scores)
        tv = 0.5 * np.abs(target.probs() - draft.probs()).sum()
        count = 8_000
        same = sum(coupled_id(target, params_of(), i) == coupled_id(draft, params_of(), i) for i in range(count))
        error = 4 * math.sqrt(0.25 / count)
        assert (1 - tv) / (1 + tv) - error < same / count < 1 - tv + error
