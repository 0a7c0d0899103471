"""Candidates-first sampling on the host: the laws and the draws of a device."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.device_sampling import distributions, probabilities
from outrider.engine.sampling.host_sampling import HostLogits, distribution_of
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState, process_row, process_unchecked
from outrider.wire.requests.params import SamplingParams
from tests.unit.outrider.engine.sampling.parameters import dense, params_of, random_logits, scores, state
from tests.unit.outrider.engine.sampling.test_device_sampling import CASES, PREFIXES

INF = math.inf


CHAINS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from((0.0, 1e-3, 0.3, 0.8, 1.7, 50.0)),
        "top_k": st.sampled_from((1, 2, 3, 10, 50, 200, 5000)),
        "top_p": st.sampled_from((1e-6, 0.1, 0.5, 0.75, 0.9, 0.99, 0.999999, 1 - 2**-53)),
        "min_p": st.sampled_from((1e-9, 0.02, 0.25, 0.5, 1.0)),
    },
).map(lambda values: SamplingParams(**values))


def on_a_device(x: np.ndarray, params: SamplingParams) -> torch.Tensor:
    """[V] float64 probabilities, by the law that is proven against transformers' processors."""
    row = LogitRow(SamplingState(params, (), ()))
    return probabilities(distributions(process_unchecked(torch.from_numpy(x)[None], [row]), [row]))[0]


class TestLaws:
    @given(x=scores() | scores(st.just(5_000)), params=CHAINS)
    @settings(max_examples=150)
    def test_equal_a_devices(self, x: np.ndarray, params: SamplingParams) -> None:
        got, wanted = dense(distribution_of(x, params)), on_a_device(x, params)
        # Sums in another order may part by one token where thousands are nearly equal, and by any that weigh nothing.
        parted = torch.maximum(got, wanted)[(got > 0) != (wanted > 0)]
        assert len(parted) <= 1 or parted.sum() - parted.max() < 1e-12
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)

    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-38, 100.0])
    def test_extremes_neither_warn_nor_lose_the_best(self, temperature: float) -> None:
        x = np.array([3e38, -3e38, 3e38, 0.0], dtype=np.float32)
        law = distribution_of(x, SamplingParams(temperature=temperature, top_p=0.9, min_p=0.01))
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
        ask = host.best_id if temperature == 0.0 else host.distribution
        with pytest.raises(NonFiniteLogits, match=r"rows \[1\]"):
            ask(1, row)
        ask(0, row), ask(2, row)
