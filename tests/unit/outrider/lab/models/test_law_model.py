"""The distributions of a model along a text are those by which it wrote the text."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.lab.models.alpha_task import AlphaTask
from outrider.lab.models.law_model import DistributionModel
from outrider.lab.models.tally import best_id
from outrider.wire.requests.params import SamplingParams
from tests.tiny_models import tiny_llama

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=7)
PROMPTS = [[3, 4, 5], [9, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_llama(tmp_path_factory.mktemp("law"), hidden_size=16, num_layers=1, sharpness=2.0))


@pytest.fixture(scope="module")
def model(folder: Path) -> DistributionModel:
    task = AlphaTask(str(folder), [], [], 6, [{"temperature": 0.0}], dtype="float32", device="cpu")
    return DistributionModel(str(folder), task, 64)


def test_each_distribution_is_the_models_after_the_previous_tokens(folder: Path, model: DistributionModel) -> None:
    ids = [3, 4, 5, 6, 7]
    found = np.stack([law(SAMPLED).probs() for law in model.distributions(ids, 2)])
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = whole(torch.tensor([ids])).logits[0].softmax(-1).numpy()
    np.testing.assert_allclose(found, expected[1:4], atol=1e-5)  # after 2, 3 and 4 tokens
    assert model.runner.pool.num_in_use == 0


def test_a_greedy_text_has_the_best_ids_and_a_sampled_one_is_reproducible(model: DistributionModel) -> None:
    greedy, drawn = (model.write(PROMPTS, 6, [params] * 2) for params in (GREEDY, SAMPLED))
    for prompt, text in zip(PROMPTS, greedy, strict=True):
        start = len(prompt)
        assert text[:start] == prompt and start < len(text) <= start + 6
        assert [best_id(law(GREEDY)) for law in model.distributions(text, start)] == text[start:]
    assert drawn != greedy and drawn == model.write(PROMPTS, 6, [SAMPLED] * 2)
    assert model.runner.pool.num_in_use == 0
