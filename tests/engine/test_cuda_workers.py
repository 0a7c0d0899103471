"""Both workers on the flash path, loaded, self-tested and prepared as on a GPU; only kernel and recorder stand in."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from outrider.engine.cuda.graphed_path import GraphedPath
from outrider.engine.cuda.step_graphs import StepShape
from outrider.engine.model_runner import ModelFacts
from outrider.engine.paths import choice
from outrider.engine.paths.paged import PagedPath
from outrider.engine.paths.varlen_attention import BLOCK_SIZE, VarlenAttention
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.params import SamplingParams
from tests.engine.cuda_pair import Pair, tiny_pair
from tests.engine.cuda_tape import TapeMaker, varlen_attn

K = 5
PROMPTS = {1: [12, 7, 99, 4, 31], 2: [5, 6, 7]}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 11},
    "penalised": {"temperature": 0.8, "seed": 11, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return tiny_pair(tmp_path_factory.mktemp("flash"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash(model: PreTrainedModel, facts: ModelFacts) -> GraphedPath:
        paged = PagedPath(model, facts.vocab_size, VarlenAttention(varlen_attn))
        return GraphedPath(paged, model, facts.vocab_size, TapeMaker(), widths=(6, 1))

    monkeypatch.setitem(choice.FACTORIES, "flash", flash)


def texts(monkeypatch: pytest.MonkeyPatch, models: tuple[str, str], path: str, **case: Any) -> tuple[Any, Pair]:
    """What both workers said over four rounds, in slots that begin a round apart."""
    encoding = case.pop("encoding", DraftLogprobs.FULL)
    pair = Pair(monkeypatch, *models, device="cpu", attention_path=path, max_slots=2, kv_cache_tokens=4096)
    params = SamplingParams(max_tokens=60, ignore_eos=True, **case)
    committed: dict[int, list[int]] = {}
    said: list[Any] = []
    for slot in [*PROMPTS, None, None]:
        if slot is not None:
            pair.open(slot, PROMPTS[slot], params)
            committed[slot] = list(PROMPTS[slot])
        for ids, verdict in zip(committed.values(), pair.round(committed, K, encoding), strict=True):
            said.append((verdict.token_ids, verdict.num_drafted, verdict.num_accepted))
            ids.extend(verdict.token_ids)
    return said, pair


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        *((name, DraftLogprobs.FULL) for name in CASES),
        *((name, DraftLogprobs.TOPK) for name, values in CASES.items() if values["temperature"]),
    ],
)
def test_graphs_say_what_the_dense_path_says(
    monkeypatch: pytest.MonkeyPatch, models: tuple[str, str], name: str, encoding: DraftLogprobs
) -> None:
    expected, _ = texts(monkeypatch, models, "dense", encoding=encoding, **CASES[name])
    said, pair = texts(monkeypatch, models, "flash", encoding=encoding, **CASES[name])
    assert said == expected
    assert any(num_accepted for _, _, num_accepted in said)
    path = pair.draft.base.loaded.runner.path
    assert (path.name, path.block_size) == ("flash", BLOCK_SIZE)
    assert StepShape(2, 6) in pair.target.base.loaded.runner.path._graphs.shapes
