"""Logits as parameters change them, and what a row remembers of its output."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.sampling.device_sampling import distributions
from outrider.engine.sampling.penalties import LogitRow, SamplingState, process_unchecked, sound_rows
from outrider.wire.requests.params import SamplingParams
from tests.unit.outrider.engine.sampling.parameters import EOS, INF, PROMPT, TOGETHER, params_of, random_logits, state


class TestProcess:
    def test_never_changes_its_input(self) -> None:
        logits = random_logits(1)
        before = logits.clone()
        processed = process_unchecked(logits, [LogitRow(state(params_of(TOGETHER)))])
        assert torch.equal(logits, before)
        assert not torch.equal(processed, before)

    @pytest.mark.parametrize(
        "values", [{}, {"temperature": 0.5, "top_k": 3}, {"min_tokens": 4}, {"bad_words": ((8, 4),)}]
    )
    def test_returns_its_input_when_nothing_is_on(self, values: dict[str, object]) -> None:
        logits = random_logits(2)
        assert process_unchecked(logits, [LogitRow(state(params_of(values)))] * 2) is logits

    @pytest.mark.parametrize("value", [math.nan, INF, -INF])
    def test_features_of_a_broken_model_are_reported(self, value: float) -> None:
        logits = random_logits(4)
        logits[1, 5] = logits[3, 60] = value
        assert sound_rows(logits).tolist() == [True, False, True, False]

    def test_finite_logits_whose_sum_overflows_are_fine(self) -> None:
        logits = torch.full((1, 64), 3e38)
        assert bool(sound_rows(logits).all())

    @pytest.mark.parametrize(
        "values",
        [
            {"bad_words": tuple((i,) for i in range(64))},
            {"bad_words": tuple((i,) for i in range(64) if i not in EOS), "min_tokens": 50},
        ],
    )
    def test_bans_that_leave_nothing_are_lifted(self, values: dict[str, object]) -> None:
        logits = random_logits(1)
        biased = params_of({**values, "logit_bias": {3: 1.0}})
        processed = process_unchecked(logits, [LogitRow(state(biased))])
        assert torch.equal(processed, process_unchecked(logits, [LogitRow(state(params_of({"logit_bias": {3: 1.0}})))]))

    def test_end_ids_outside_the_vocabulary_are_ignored(self) -> None:
        params = SamplingParams(max_tokens=9, min_tokens=5)
        row = LogitRow(SamplingState(params, PROMPT, (7, 64, 70_000)))
        assert (process_unchecked(random_logits(1), [row]) == -INF).nonzero().tolist() == [[0, 7]]

    @pytest.mark.parametrize("penalty", [5e-324, 1e-40, 100.0])
    def test_extreme_penalties_stay_finite(self, penalty: float) -> None:
        logits = random_logits(1)
        logits[0, 5] = 0.0
        logits[0, 2] = 3e38
        params = params_of({"repetition_penalty": penalty, "frequency_penalty": -2.0, "logit_bias": {2: 100.0}})
        rows = [LogitRow(state(params))]
        processed = process_unchecked(logits, rows)
        assert bool(processed.isfinite().all())
        assert not bool(distributions(processed, rows).isnan().any())


FEW_IDS = st.lists(st.integers(0, 2), max_size=6).map(tuple)


class TestState:
    @given(st.lists(FEW_IDS.filter(bool), max_size=8), FEW_IDS, FEW_IDS, FEW_IDS)
    def test_banned_are_the_ids_that_would_complete_a_bad_word(
        self, words: list[tuple[int, ...]], prompt: tuple[int, ...], output: tuple[int, ...], drafts: tuple[int, ...]
    ) -> None:
        held = state(SamplingParams(bad_words=tuple(words)), output, prompt)
        for size in range(len(drafts) + 1):
            text = (*prompt, *output, *drafts[:size])
            completing = {i for i in range(9) if any((*text, i)[-len(word) :] == word for word in words)}
            assert held.banned(drafts[:size], vocab_size=9) == completing

    def test_extended_corrected_and_reopened_outputs_equal_a_fresh_state(self) -> None:
        generator = torch.Generator().manual_seed(2)
        params, logits = params_of({**TOGETHER, "bad_words": ((1, 2), (3, 4, 5), (2, 2))}), random_logits(1)
        moving = SamplingState(params, PROMPT, EOS)
        output: list[int] = []
        for _ in range(60):
            kept = int(torch.randint(0, len(output) + 1, (), generator=generator))
            if bool(torch.rand((), generator=generator) < 0.7):
                kept = len(output)
            output = output[:kept] + torch.randint(0, 6, (int(kept % 4),), generator=generator).tolist() + [2]
            moving.set_output(tuple(output) if len(output) % 2 else output)
            assert moving.num_output == len(output)
            got = process_unchecked(logits, [LogitRow(moving, (3, 3))])
            assert torch.equal(got, process_unchecked(logits, [LogitRow(state(params, tuple(output)), (3, 3))]))
