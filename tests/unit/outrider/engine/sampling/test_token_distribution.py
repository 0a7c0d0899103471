"""A row's law, and draws from it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.device_sampling import probabilities
from outrider.engine.sampling.host_sampling import distribution_of
from outrider.engine.sampling.token_distribution import EmptyDistribution, TokenDistribution, draw_index, truncate_topk
from outrider.wire.requests.params import SamplingParams
from tests.unit.outrider.engine.sampling.drawing import cut_dense, draw
from tests.unit.outrider.engine.sampling.parameters import dense, scores

INF = math.inf


class TestDraw:
    @given(x=scores(st.sampled_from((1, 7, 50, 511, 512, 513, 1500))), u=st.floats(2.0**-54, 1 - 2.0**-53))
    @settings(max_examples=100)
    def test_equals_a_devices_draw(self, x: np.ndarray, u: float) -> None:
        law = TokenDistribution(x.size, x - x.max()).normalised()
        got = law.draw(u)
        cdf = np.cumsum(law.weights)
        below, above = cdf[got - 1] if got else 0.0, cdf[got]
        slack = 1e-12 * cdf[-1]
        assert law.scores[got] > -INF and below - slack <= u * cdf[-1] <= above + slack
        if below + slack < u * cdf[-1] < above - slack:
            assert got == int(draw(torch.from_numpy(law.scores)[None], torch.tensor([u], dtype=torch.float64)))

    @pytest.mark.parametrize("size", [5, 2000])
    @pytest.mark.parametrize("value", [-INF, INF, math.nan])
    def test_nothing_to_draw_from(self, size: int, value: float) -> None:
        with pytest.raises(EmptyDistribution, match="nothing to draw from"):
            TokenDistribution(size, np.full(size, value, dtype=np.float32)).draw(0.5)

    def test_a_goal_past_a_chunks_own_sum_is_its_last_with_mass(self) -> None:
        weights = np.zeros(2000)
        weights[[3, 600, 700, 1999]] = 1.0
        assert draw_index(weights, 1 - 2.0**-53) == 1999
        assert draw_index(weights[:1500], math.nextafter(2 / 3, 0)) in (600, 700)


class TestLaw:
    @given(first=scores(st.just(40)), second=scores(st.just(40)), k=st.integers(0, 40), n=st.integers(0, 40))
    @settings(max_examples=100)
    def test_at_the_ids_of_another(self, first: np.ndarray, second: np.ndarray, k: int, n: int) -> None:
        one, other = distribution_of(first, SamplingParams(top_k=k)), distribution_of(second, SamplingParams(top_k=n))
        at = np.arange(40) if other.ids is None else other.ids
        assert one.probs_at(other).tolist() == dense(one)[at].tolist()

    @given(x=scores(), n=st.integers(1, 60), k=st.integers(0, 80))
    @settings(max_examples=50)
    def test_cut_to_the_best(self, x: np.ndarray, n: int, k: int) -> None:
        law = distribution_of(x, SamplingParams(top_k=k))
        cut = truncate_topk(law, n)
        whole = probabilities(cut_dense(torch.from_numpy(law.dense_scores())[None].log_softmax(1), n))[0]
        values = torch.sort(dense(cut), descending=True).values
        torch.testing.assert_close(values, torch.sort(whole, descending=True).values, atol=1e-6, rtol=0)
        assert int((dense(cut) > 0).sum()) <= n
        assert bool((dense(law)[dense(cut) > 0] > 0).all())
        with pytest.raises(ValueError, match="n is 0"):
            truncate_topk(law, 0)
