"""The beam search as such is transformers' own, over tables of random laws: the same answers with the same scores."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from outrider.engine.speculation.beam import (
    BeamLevel,
    BeamSearch,
    Hypothesis,
    draft_shape,
    level_to_proto,
    levels_from_proto,
)
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import EarlyStopping
from outrider.wire.requests.params import BeamParams, SamplingParams
from outrider.wire.requests.speculation import AUTO, NumDraftTokens, Speculation

PROMPT = [5, 3]
EARLY_STOPPING = {EarlyStopping.FALSE: False, EarlyStopping.TRUE: True, EarlyStopping.NEVER: "never"}


class Table(PreTrainedModel, GenerationMixin):
    """A model whose logits are random numbers that all tokens before decide."""

    config_class = PreTrainedConfig
    main_input_name = "input_ids"
    base_model_prefix = "table"
    supports_gradient_checkpointing = False

    def __init__(self, vocab_size: int, seed: int, scale: float, stop_bias: float) -> None:
        super().__init__(PreTrainedConfig(vocab_size=vocab_size, is_encoder_decoder=False))
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.vocab_size, self.seed, self.scale, self.stop_bias = vocab_size, seed, scale, stop_bias
        self.generation_config = GenerationConfig()

    def logits(self, ids: list[int]) -> torch.Tensor:
        numbers = np.random.default_rng([self.seed, *ids]).normal(0.0, self.scale, self.vocab_size)
        numbers[:2] += self.stop_bias
        return torch.tensor(numbers, dtype=torch.float32)

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=torch.stack([self.logits(ids) for ids in input_ids.tolist()])[:, None])


def by_transformers(model: Table, params: BeamParams, max_tokens: int, stop_ids: list[int]) -> list[Hypothesis]:
    found = model.generate(
        torch.tensor([PROMPT]),
        num_beams=params.width,
        num_return_sequences=params.width,
        length_penalty=params.length_penalty,
        early_stopping=EARLY_STOPPING[params.early_stopping],
        max_new_tokens=max_tokens,
        eos_token_id=stop_ids or None,
        pad_token_id=model.vocab_size,
        do_sample=False,
        use_cache=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    answers = list[Hypothesis]()
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        ids = [each for each in row[len(PROMPT) :] if each != model.vocab_size and each >= 0]
        answers.append(Hypothesis(tuple(ids), score, ids[-1] if ids[-1] in stop_ids else None))
    return answers


def step(search: BeamSearch, model: Table) -> BeamLevel:
    """Decide and take in one level, by the laws after what all levels so far say."""
    rows = torch.stack([model.logits([*PROMPT, *ids]) for ids in live(search)]).log_softmax(1)
    log_probs, ids = rows.topk(min(search.num_candidates, model.vocab_size), dim=1)
    level = search.choose(ids.numpy(), log_probs.numpy())
    search.apply(level)
    return level


def live(search: BeamSearch) -> list[list[int]]:
    beams = [list[int]()]
    for level in search.levels:
        beams = [[*beams[parent], token_id] for parent, token_id, _ in level.active]
    return beams


@pytest.mark.parametrize("seed", range(150))
def test_answers_are_transformers_own(seed: int) -> None:
    dice = random.Random(seed)
    width, num_stops = dice.randint(2, 6), dice.randint(0, 2)
    model = Table(dice.randint(20, 40), seed, dice.choice([0.5, 2.0]), dice.choice([-1.0, 1.0, 3.0]))
    params = BeamParams(width, dice.choice([-1.0, 0.0, 0.6, 1.0, 2.0]), dice.choice(list(EarlyStopping)))
    max_tokens, stop_ids = dice.randint(1, 12), list(range(num_stops))
    search = BeamSearch(params, max_tokens, set(stop_ids))
    while not search.is_done:
        step(search, model)
    expected = by_transformers(model, params, max_tokens, stop_ids)
    found = search.hypotheses()
    assert [(each.ids, each.stop_id) for each in found] == [(each.ids, each.stop_id) for each in expected]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], rel=1e-6)


def test_levels_alone_bring_another_search_to_the_same_state() -> None:
    model, params = Table(24, 3, 1.0, 1.0), BeamParams(3)
    first, other = BeamSearch(params, 8, {0}), BeamSearch(params, 8, {0})
    while not first.is_done:
        other.apply(step(first, model))
        assert (other.sums, other.is_done) == (first.sums, first.is_done)
    assert other.hypotheses() == first.hypotheses()


def test_where_fewer_tokens_are_left_than_beams_there_are_fewer() -> None:
    model = Table(4, 1, 1.0, 0.0)
    search = BeamSearch(BeamParams(6), 3, {0})
    assert [len(step(search, model).active) for _ in range(3)] == [3, 6, 0]
    assert len(search.hypotheses()) == 6


def test_levels_travel() -> None:
    levels = (BeamLevel(((0, 7, -1.5), (0, 9, -2.0)), ((0, 1, -0.25),)), BeamLevel((), ((1, 7, -3.0),)))
    assert levels_from_proto([level_to_proto(level) for level in levels], 10) == levels


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"parents": [0], "ids": [10], "sums": [0.0]}], "10, must be a token id"),
        ([{"parents": [0], "ids": [3, 4], "sums": [0.0]}], "1 parents, 2 ids"),
        ([{"parents": [0], "ids": [3], "sums": [math.nan]}], "NaN"),
        ([{"parents": [0] * 129, "ids": [3] * 129, "sums": [0.0] * 129}], "at most 128"),
        ([{"parents": [0], "ids": [3], "sums": [0.0]}, {"parents": [1], "ids": [3], "sums": [0.0]}], "not among 1"),
        ([{}, {"ended_parents": [0], "ended_ids": [3], "ended_sums": [0.0]}], "not among 0"),
    ],
)
def test_levels_that_cannot_be_are_refused(messages: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        levels_from_proto([pb.BeamLevel(**message) for message in messages], 10)


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ((4, AUTO, 32), (16, 2)),
        ((4, 1, 32), (16, 1)),
        ((2, 9, 32), (8, 4)),
        ((8, 4, 32), (32, 1)),
        ((8, AUTO, 10), (10, 1)),
        ((8, 4, 7), (0, 0)),
    ],
)
def test_what_a_draft_grows(asked: tuple[int, NumDraftTokens, int], shape: tuple[int, int]) -> None:
    width, num_draft_tokens, max_draft_tokens = asked
    params = SamplingParams(temperature=0.0, beams=BeamParams(width))
    assert draft_shape(params, Speculation(num_draft_tokens, max_draft_tokens)) == shape
