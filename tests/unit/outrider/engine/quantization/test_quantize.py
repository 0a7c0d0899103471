"""int8 weights: close to the whole ones, a quarter of their bytes, and speculation on them changes no token."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, LlamaConfig
from transformers.pytorch_utils import Conv1D

from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.quantization.quantize import NARROW, Int8Linear, quantize_int8
from outrider.engine.step_plan import Row
from outrider.wire.settings.config import TargetConfig
from tests.samples import total
from tests.shrunk import shrunk
from tests.stack import DEMO_TARGET, running
from tests.tiny_models import random_model, save

LOGIT_ERROR = 0.06
"""Share of the largest logit; 8 bits give the demo target 0.03."""


def load(model: str, quantization: str, **changes: Any) -> ModelRunner:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_slots": 2, "context_limit": 512}
    return load_runner(TargetConfig(model=model, kv_cache_tokens=None, quantization=quantization, **options | changes))


def logits_of(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """[T, V] float32 of one prompt fed whole."""
    table = runner.pool.new_table()
    logits = runner.forward([Row.of(table, ids, 0, len(ids))])
    table.free()
    return logits


def greedy(runner: ModelRunner, ids: list[int], num_new: int) -> list[int]:
    ids, table, cached = list(ids), runner.pool.new_table(), 0
    for _ in range(num_new):
        best = int(runner.forward([Row.of(table, ids, cached, 1)]).argmax())
        cached = len(ids)
        ids.append(best)
    table.free()
    return ids[-num_new:]


@pytest.fixture(scope="module")
def prompt_ids(dev_prompts: list[str]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    return [tokenizer(prompt)["input_ids"] for prompt in dev_prompts[:3]]


def _complete(url: str, prompt: str, num_draft_tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "speculation": {"num_draft_tokens": num_draft_tokens}}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_the_demo_target_gives_nearly_the_same_tokens(prompt_ids: list[list[int]], record_property: Any) -> None:
    whole, rounded = load(DEMO_TARGET, "none"), load(DEMO_TARGET, "int8")
    assert (whole.facts.quantization, rounded.facts.quantization) == ("none", "int8")
    assert whole.facts.num_parameters == rounded.facts.num_parameters
    same = total = 0
    for ids in prompt_ids:
        truth, found = logits_of(whole, ids), logits_of(rounded, ids)
        assert 0 < (truth - found).abs().max() <= LOGIT_ERROR * truth.abs().max()
        same += int((truth.argmax(-1) == found.argmax(-1)).sum())
        total += len(ids)
        a, b = greedy(whole, ids, 6), greedy(rounded, ids, 6)
        assert a[0] == b[0]
    record_property("argmax_agreement", same / total)
    assert same / total > 0.93


@pytest.mark.parametrize("name", ["the demo target", "gemma3_text"])
def test_the_fused_path_computes_with_the_same_rounded_weights(
    name: str, prompt_ids: list[list[int]], tmp_path: Path
) -> None:
    model = DEMO_TARGET if name == "the demo target" else save(random_model(shrunk(name), seed=3), tmp_path)
    fused, paged = (load(model, "int8", attention_path=path, context_limit=None) for path in ("fused", "paged"))
    assert fused.path.name == "fused" and fused.path.batch_invariant
    ids = [token % fused.facts.vocab_size for token in prompt_ids[0][:100]]
    one, other = logits_of(fused, ids), logits_of(paged, ids)
    assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, NARROW, NARROW + 1])
def test_a_layer_is_its_rounded_weights_at_every_width(dtype: torch.dtype, num_tokens: int) -> None:
    model = random_model_of_one_size().to(dtype)
    layer = model.model.layers[0].mlp.down_proj
    whole = layer.weight.detach().clone()  # [N, K]
    quantize_int8(model)
    rounded = model.model.layers[0].mlp.down_proj
    assert isinstance(rounded, Int8Linear) and rounded.weight.dtype is torch.int8
    scale = rounded.scale.float()  # [N]
    weights = rounded.weight.float() * scale[:, None]
    half_a_step = 0.51 * whole.float().abs().amax(1) / 127  # symmetric, per channel: nothing is further off
    assert bool(((weights - whole.float()).abs() <= half_a_step[:, None] + 1e-2 * whole.float().abs()).all())
    x = torch.randn(2, num_tokens, layer.in_features).to(dtype)[:1]
    expected = x.float() @ weights.t()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert float((rounded(x).float() - expected).abs().max()) <= tolerance * float(expected.abs().max())


def random_model_of_one_size() -> Any:
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    return random_model(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2), 0)


def test_layers_stored_the_other_way_round_and_with_a_bias() -> None:
    """GPT-2's: their weights are [K, N]."""
    model = random_model(GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64), 0)
    ids = torch.arange(24)[None]
    whole = model(ids).logits
    assert any(isinstance(module, Conv1D) for module in model.modules())
    quantize_int8(model)
    kinds = {type(module) for module in model.modules()}
    assert Int8Linear in kinds and Conv1D not in kinds
    assert float((model(ids).logits - whole).abs().max()) <= LOGIT_ERROR * float(whole.abs().max())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_speculation_changes_no_token_of_a_rounded_pair(dev_prompts: list[str]) -> None:
    """Through the real services, against the same target without its draft; both models rounded."""
    int8 = ("--quantization", "int8")
    with running(target_args=int8, draft_args=int8) as stack:
        assert (stack.target_info().quantization, stack.draft_info().quantization) == ("int8", "int8")
        for prompt in dev_prompts[:3]:
            texts = [_complete(stack.http, prompt, k) for k in (0, 4)]
            assert texts[0] == texts[1]
        assert total(stack.metrics(), "spec_accepted_tokens_total") > 0
