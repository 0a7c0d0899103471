"""Logits to laws to tokens: every parameter against transformers' processors, and the corners they leave open."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from outrider.engine.sampling.device_sampling import argmax, cut, distributions, inverse_cdf, probabilities
from outrider.engine.sampling.penalties import LogitRow, SamplingState, process_unchecked
from outrider.wire.requests.params import SamplingParams
from tests.unit.outrider.engine.sampling.drawing import cut_dense, draw, draw_weights
from tests.unit.outrider.engine.sampling.parameters import (
    EOS,
    INF,
    OUTPUT,
    PROMPT,
    TOGETHER,
    params_of,
    random_logits,
    state,
)


def openai_penalties(params: SamplingParams, output: tuple[int, ...], scores: Tensor) -> Tensor:
    """transformers has none of these; OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    for token_id in set(output):
        scores[0, token_id] -= output.count(token_id) * params.frequency_penalty + params.presence_penalty
    for token_id, bias in params.logit_bias.items():
        scores[0, token_id] += bias
    return scores


def reference(params: SamplingParams, logits: Tensor, output: tuple[int, ...]) -> Tensor:
    """[V] float32 -> [V] float64 probabilities, through transformers' processors in float64."""
    ids = torch.tensor([PROMPT + output])
    scores = logits[None].double()
    if params.repetition_penalty != 1.0:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = openai_penalties(params, output, scores.clone())
    if params.bad_words:
        scores = hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(ids, scores)
    if params.min_tokens:
        ends = [*([] if params.ignore_eos else EOS), *params.stop_token_ids]
        scores = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, ends)(ids, scores)
    if params.temperature != 1.0:
        scores = hf.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].softmax(-1)


ALONE = {
    "nothing": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.9},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k past the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.8},
    "top_p small": {"top_p": 1e-6},
    "top_p almost 1": {"top_p": 0.9999},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "repetition up": {"repetition_penalty": 1.7},
    "repetition down": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative penalties": {"presence_penalty": -1.1, "frequency_penalty": -0.4},
    "bias": {"logit_bias": {0: 5.0, 5: -3.5, 63: -100.0}},
    "bad words": {"bad_words": ((4,), (8,))},
    "bad words that have begun": {"bad_words": ((5, 2, 9, 30), (9, 31), (2, 32), (3, 40, 5, 5, 2, 9, 31))},
    "min tokens": {"min_tokens": 6, "stop_token_ids": (12, 13)},
    "min tokens without eos": {"min_tokens": 6, "stop_token_ids": (12,), "ignore_eos": True},
    "min tokens reached": {"min_tokens": 4},
}
CASES = {**ALONE, "together": TOGETHER}
PREFIXES = ((), (17,), (17, 5), (17, 5, 17, 9))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
def test_the_lowest_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(1, seed=3)
    rows = [LogitRow(state(params_of({"temperature": temperature})), ())]
    law = probabilities(distributions(process_unchecked(logits, rows), rows))
    assert law[0].argmax() == logits[0].argmax() and law[0].max() == 1.0


class TestAgainstTransformers:
    @pytest.mark.parametrize("name", CASES)
    def test_support_and_probabilities(self, name: str) -> None:
        params = params_of(CASES[name])
        for seed in range(5):
            logits = random_logits(len(PREFIXES), seed=seed)
            rows = [LogitRow(state(params), prefix) for prefix in PREFIXES]
            law = probabilities(distributions(process_unchecked(logits, rows), rows))
            expected = torch.stack([reference(params, logits[r], OUTPUT + prefix) for r, prefix in enumerate(PREFIXES)])
            assert torch.equal(law > 0, expected > 0)
            torch.testing.assert_close(law, expected, atol=1e-6, rtol=0)

    def test_large_vocabulary(self) -> None:
        logits = random_logits(2, 128_256, seed=4) / 3  # flat: its nucleus is wider than the first candidates
        for values in ({"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"temperature": 0.05, "top_p": 0.9}):
            params = SamplingParams(**values)
            rows = [LogitRow(SamplingState(params, (), ()))] * 2
            law = probabilities(distributions(process_unchecked(logits, rows), rows))
            expected = torch.stack([reference(params, row, ()) for row in logits])
            # Among 128k near-equal tails the two float64 sums may part by one token at the edge.
            assert int(((law > 0) != (expected > 0)).sum()) <= 2
            torch.testing.assert_close(law, expected, atol=1e-6, rtol=0)

    def test_greedy_argmax_is_generates(self) -> None:
        logits = random_logits(len(CASES), seed=6)
        params = [dataclasses.replace(params_of(v), temperature=0.0) for v in CASES.values()]
        rows = [LogitRow(state(p)) for p in params]
        processed = process_unchecked(logits, rows)
        plain = [dataclasses.replace(p, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) for p in params]
        expected = [int(reference(p, logits[r], OUTPUT).argmax()) for r, p in enumerate(plain)]
        assert argmax(processed).tolist() == expected
        assert distributions(processed, rows).exp().argmax(1).tolist() == expected


class TestDistributions:
    def test_ties_at_the_edge(self) -> None:
        logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 1.0]])

        def support(**values: float) -> list[int]:
            rows = [LogitRow(SamplingState(SamplingParams(**values), (), ()))]
            return (distributions(logits, rows)[0] > -INF).nonzero()[:, 0].tolist()

        assert support(top_k=2) == [1, 2, 3]  # all that tie with the second best
        assert support(top_k=4) == [0, 1, 2, 3, 5]
        assert support(top_p=0.4) == [1, 2]  # the smallest set; lowest ids first
        assert support(top_p=0.85) == [0, 1, 2, 3]
        assert support(top_k=4, top_p=0.2) == [1]

    def test_temperature_zero_is_argmax_even_on_ties(self) -> None:
        logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
        rows = [LogitRow(SamplingState(SamplingParams(temperature=0.0, top_k=1), (), ()))] * 2
        assert distributions(logits, rows).exp().tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
        assert argmax(logits).tolist() == [1, 0]

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        logits = random_logits(len(CASES), 5000, seed=8)
        rows = [LogitRow(state(params_of(values)), (17,)) for values in CASES.values()]
        together = distributions(process_unchecked(logits, rows), rows)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        shuffled = [rows[i] for i in order]
        assert torch.equal(distributions(process_unchecked(logits[order], shuffled), shuffled), together[order])
        for r, row in enumerate(rows):
            assert torch.equal(distributions(process_unchecked(logits[r : r + 1], [row]), [row])[0], together[r])


class TestDraw:
    LAW = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).log()

    @pytest.mark.parametrize(
        ("u", "expected"), [(2.0**-54, 1), (0.2499, 1), (0.2501, 3), (0.7499, 3), (0.7501, 4), (1 - 2.0**-53, 4)]
    )
    def test_inverse_cdf(self, u: float, expected: int) -> None:
        assert draw(self.LAW, torch.tensor([u], dtype=torch.float64)).tolist() == [expected]

    @pytest.mark.parametrize(("u", "expected"), [(0.25, 3), (0.75, 4), (math.nextafter(0.25, 0), 1)])
    def test_an_interval_is_closed_below(self, u: float, expected: int) -> None:
        weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
        assert draw_weights(weights, torch.tensor([u], dtype=torch.float64)).tolist() == [expected]

    @pytest.mark.parametrize(
        ("cdf", "u", "expected"), [([0.0, 1.0, 1.1, 3.0, 4.0, 4.0], 0.26, 3), ([0.0, 1.0, 1.0, 3.0, 3.9, 4.0], 0.99, 4)]
    )
    def test_a_parallel_scan_that_rounds(
        self, monkeypatch: pytest.MonkeyPatch, cdf: list[float], u: float, expected: int
    ) -> None:
        """Sums as a GPU may return them, exaggerated: raised over a zero, or short of u * total at the last mass."""
        weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
        monkeypatch.setattr(Tensor, "cumsum", lambda self, dim: torch.tensor([cdf], dtype=torch.float64))
        assert draw_weights(weights, torch.tensor([u], dtype=torch.float64)).tolist() == [expected]

    @pytest.mark.parametrize("value", [-INF, INF, math.nan])
    def test_nothing_to_draw_from(self, value: float) -> None:
        _, sound = inverse_cdf(torch.full((1, 5), value).double().exp(), torch.tensor([0.5], dtype=torch.float64))
        assert not bool(sound.any())


class TestCut:
    def test_the_best_renormalised(self) -> None:
        law = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
        assert cut_dense(law, 2).exp()[0].tolist() == pytest.approx([0.0, 0.4 / 0.7, 0.0, 0.3 / 0.7])

    def test_at_most_n_even_on_ties(self) -> None:
        laws = cut(torch.zeros(1, 50).log_softmax(-1), 8)
        assert laws.ids.shape == laws.scores.shape == (1, 8)
        assert float(laws.scores.double().exp().sum()) == pytest.approx(1.0, abs=1e-6)

    def test_what_is_drawn_is_in_the_row_that_is_sent(self) -> None:
        law = random_logits(200, 50).log_softmax(-1)
        u = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).clamp_min(1e-9)
        for laws in (cut(law, 5), cut(law, 50), cut(law, None)):
            ids, sound = laws.draw(u)
            assert bool(sound.all())
            assert all(row.prob(token_id) > 0 for row, token_id in zip(laws.rows(50), ids.tolist(), strict=True))
