"""Candidates-first sampling on the host: the laws and the draws of a device."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.host_sampling import HostLogits, law_of
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState, process_row, process_unchecked
from outrider.engine.sampling.row_law import (
    NothingToDraw,
    RowLaw,
    draw_place,
    truncate_topk,
)
from outrider.engine.sampling.sampling import distributions, probabilities
from outrider.wire.requests.params import SamplingParams
from tests.unit.outrider.engine.sampling.drawing import cut_dense, draw
from tests.unit.outrider.engine.sampling.test_sampling import CASES, PREFIXES, params_of, random_logits, state

INF = math.inf


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations: on a busy machine two threads wait for each other at every one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def scores(draw: st.DrawFn, sizes: st.SearchStrategy[int] = st.integers(1, 300)) -> np.ndarray:  # noqa: B008
    """[N] float32, from peaked to flat; often with many equals, sometimes with bans, never with nothing left."""
    size, seed, scale = (
        draw(sizes),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from((0.01, 0.5, 2.0, 10.0, 60.0))),
    )
    generator = np.random.default_rng(seed)
    x = scale * generator.standard_normal(size)
    if step := draw(st.sampled_from((0.0, 0.25, 1.0, 100.0))):
        x = np.round(x / step) * step
    if draw(st.booleans()):
        x[generator.random(size) < 0.3] = -INF
    x[generator.integers(size)] = 1.5
    return x.astype(np.float32)


CHAINS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from((0.0, 1e-3, 0.3, 0.8, 1.7, 50.0)),
        "top_k": st.sampled_from((1, 2, 3, 10, 50, 200, 5000)),
        "top_p": st.sampled_from((1e-6, 0.1, 0.5, 0.75, 0.9, 0.99, 0.999999, 1 - 2**-53)),
        "min_p": st.sampled_from((1e-9, 0.02, 0.25, 0.5, 1.0)),
    },
).map(lambda values: SamplingParams(**values))


def dense(law: RowLaw) -> torch.Tensor:
    """[V] float64 probabilities."""
    probs = np.zeros(law.vocab_size)
    probs[slice(None) if law.ids is None else law.ids] = law.probs()
    return torch.from_numpy(probs)


def on_a_device(x: np.ndarray, params: SamplingParams) -> torch.Tensor:
    """[V] float64 probabilities, by the law that is proven against transformers' processors."""
    row = LogitRow(SamplingState(params, (), ()))
    return probabilities(distributions(process_unchecked(torch.from_numpy(x)[None], [row]), [row]))[0]


class TestLaws:
    @given(x=scores() | scores(st.just(5_000)), params=CHAINS)
    @settings(max_examples=150)
    def test_equal_a_devices(self, x: np.ndarray, params: SamplingParams) -> None:
        got, wanted = dense(law_of(x, params)), on_a_device(x, params)
        # Sums in another order may part by one token where thousands are nearly equal, and by any that weigh nothing.
        parted = torch.maximum(got, wanted)[(got > 0) != (wanted > 0)]
        assert len(parted) <= 1 or parted.sum() - parted.max() < 1e-12
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)

    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-38, 100.0])
    def test_extremes_neither_warn_nor_lose_the_best(self, temperature: float) -> None:
        x = np.array([3e38, -3e38, 3e38, 0.0], dtype=np.float32)
        law = law_of(x, SamplingParams(temperature=temperature, top_p=0.9, min_p=0.01))
        assert law.prob(0) == pytest.approx(0.5) and law.prob(1) == 0.0


class TestRows:
    @pytest.mark.parametrize("name", CASES)
    def test_penalties_equal_the_batchs_to_the_bit(self, name: str) -> None:
        logits, params = random_logits(1, seed=5), params_of(CASES[name])
        for prefix in PREFIXES:
            row = LogitRow(state(params), prefix)
            assert torch.equal(
                torch.from_numpy(process_row(logits[0].numpy(), row)), process_unchecked(logits, [row])[0]
            )

    @pytest.mark.parametrize("value", [math.nan, INF, -INF])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_broken_model_is_a_clear_error(self, value: float, temperature: float) -> None:
        logits = random_logits(3)
        logits[1, 5] = value
        host, row = HostLogits(logits), LogitRow(state(params_of({"temperature": temperature})))
        ask = host.best_id if temperature == 0.0 else host.law
        with pytest.raises(NonFiniteLogits, match=r"rows \[1\]"):
            ask(1, row)
        ask(0, row), ask(2, row)


class TestDraw:
    @given(x=scores(st.sampled_from((1, 7, 50, 511, 512, 513, 1500))), u=st.floats(2.0**-54, 1 - 2.0**-53))
    @settings(max_examples=100)
    def test_equals_a_devices_draw(self, x: np.ndarray, u: float) -> None:
        law = RowLaw(x.size, x - x.max()).normalised()
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
        with pytest.raises(NothingToDraw, match="nothing to draw from"):
            RowLaw(size, np.full(size, value, dtype=np.float32)).draw(0.5)

    def test_a_goal_past_a_chunks_own_sum_is_its_last_with_mass(self) -> None:
        weights = np.zeros(2000)
        weights[[3, 600, 700, 1999]] = 1.0
        assert draw_place(weights, 1 - 2.0**-53) == 1999
        assert draw_place(weights[:1500], math.nextafter(2 / 3, 0)) in (600, 700)


class TestLaw:
    @given(first=scores(st.just(40)), second=scores(st.just(40)), k=st.integers(0, 40), n=st.integers(0, 40))
    @settings(max_examples=100)
    def test_at_the_ids_of_another(self, first: np.ndarray, second: np.ndarray, k: int, n: int) -> None:
        one, other = law_of(first, SamplingParams(top_k=k)), law_of(second, SamplingParams(top_k=n))
        at = np.arange(40) if other.ids is None else other.ids
        assert one.probs_at(other).tolist() == dense(one)[at].tolist()

    @given(x=scores(), n=st.integers(1, 60), k=st.integers(0, 80))
    @settings(max_examples=50)
    def test_cut_to_the_best(self, x: np.ndarray, n: int, k: int) -> None:
        law = law_of(x, SamplingParams(top_k=k))
        cut = truncate_topk(law, n)
        whole = probabilities(cut_dense(torch.from_numpy(law.dense_scores())[None].log_softmax(1), n))[0]
        values = torch.sort(dense(cut), descending=True).values
        torch.testing.assert_close(values, torch.sort(whole, descending=True).values, atol=1e-6, rtol=0)
        assert int((dense(cut) > 0).sum()) <= n
        assert bool((dense(law)[dense(cut) > 0] > 0).all())
        with pytest.raises(ValueError, match="n is 0"):
            truncate_topk(law, 0)
