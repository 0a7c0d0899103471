"""The paged path over torch's varlen_attn, with the kernel's documented semantics standing in for the kernel.

No GPU is needed: what is proven is that plans, block tables, layouts and windows are what the kernel asks for.
"""

import random
from typing import Any

import pytest
import torch

from outrider.engine.attention.paged import PagedPath
from outrider.engine.attention.paged_plan import AttentionOptions, PagedPlan
from outrider.engine.attention.varlen_attention import (
    BLOCK_SIZE,
    VarlenAttention,
    model_refusal,
    refusal,
    torch_refusal,
)
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.self_test import NUM_BLOCKS, largest_error
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row
from tests.shrunk import shrunk
from tests.tiny_models import random_model
from tests.unit.outrider.engine.cuda.cuda_varlen import varlen_attn

SUPPORTED = ["llama", "qwen3", "gpt2", "gpt_neox", "mistral", "mixtral", "phi3", "olmo2"]
CONTEXT = 600


def facts(vocab_size: int, context_limit: int = 128) -> ModelFacts:
    return ModelFacts("tiny", vocab_size, context_limit, "float32", "cpu", (0,), 0)


def varlen_runner(name: str) -> tuple[ModelRunner, UncachedModel]:
    model = random_model(shrunk(name), seed=3)
    vocab_size = model.config.vocab_size
    path = PagedPath(model, vocab_size, VarlenAttention(varlen_attn))
    runner = ModelRunner(path, facts(vocab_size), KVPool(NUM_BLOCKS, BLOCK_SIZE), torch.device("cpu"))
    return runner, UncachedModel(model)


@pytest.mark.parametrize("name", SUPPORTED)
def test_prefill_decode_verify_and_rollback_equal_a_forward_without_cache(name: str) -> None:
    assert largest_error(*varlen_runner(name)) < 1e-4


def test_rows_over_several_scattered_blocks_read_their_own_tokens_alone() -> None:
    config = shrunk("llama")
    config.max_position_embeddings = CONTEXT
    model = random_model(config, seed=3)
    path = PagedPath(model, config.vocab_size, VarlenAttention(varlen_attn))
    runner = ModelRunner(path, facts(config.vocab_size, CONTEXT), KVPool(9, BLOCK_SIZE), torch.device("cpu"))
    runner.allocate()
    assert path._cache is not None
    with torch.inference_mode():
        for layer in path._cache.layers:  # what nobody has written must not matter
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
    generator = random.Random(1)
    tables = [runner.pool.new_table() for _ in range(2)]
    sequences = [[generator.randrange(config.vocab_size) for _ in range(n)] for n in (CONTEXT - 7, 300)]
    truth = [UncachedModel(model).forward(ids)[-6:] for ids in sequences]
    done = [0, 0]
    while any(n < len(ids) - 6 for n, ids in zip(done, sequences, strict=True)):  # in turn, so that blocks interleave
        for i, ids in enumerate(sequences):
            end = min(done[i] + 130, len(ids) - 6)
            if end > done[i]:
                runner.forward([Row.of(tables[i], ids[:end], done[i], 0)])
                done[i] = end
    assert tables[0].blocks != sorted(range(tables[0].blocks[0], tables[0].blocks[0] + len(tables[0].blocks)))
    rows = [Row.of(table, ids, n, 6) for table, ids, n in zip(tables, sequences, done, strict=True)]
    torch.testing.assert_close(runner.forward(rows), torch.cat(truth), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("width", [1, 6])
def test_a_window_counts_the_querys_own_key(window: int, width: int) -> None:
    """Against one query at a time over the keys that it may see."""
    torch.manual_seed(0)
    table = KVPool(2, BLOCK_SIZE).new_table()
    table.reserve(30)
    plan = PagedPlan.build([Row.of(table, [1] * 30, 30 - width, width)], torch.device("cpu"), 97)
    keys, values = torch.randn(2, 3, BLOCK_SIZE, 2, 8).unbind()
    query = torch.randn(width, 4, 8)
    found = VarlenAttention(varlen_attn).attend(query, keys, values, plan, AttentionOptions(0.3, window=window))
    own_keys, own_values = keys[table.blocks[0], :30], values[table.blocks[0], :30]  # [30, 2, 8]
    for i in range(width):
        last = 30 - width + i + 1
        seen = slice(max(0, last - window), last)
        for head in range(4):
            weights = (own_keys[seen, head // 2] @ query[i, head] * 0.3).softmax(dim=0)
            torch.testing.assert_close(found[i, head], weights @ own_values[seen, head // 2])


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"sinks": torch.zeros(4)}, {"chunk": 16}])
def test_what_the_kernel_lacks_is_never_left_out_silently(options: dict[str, object]) -> None:
    with pytest.raises(NotImplementedError):
        VarlenAttention(varlen_attn).attend(
            torch.zeros(1, 4, 8), torch.zeros(1), torch.zeros(1), None, AttentionOptions(1.0, **options)
        )


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("llama", torch.float32, "bfloat16 or float16"),
        ("gemma2", torch.bfloat16, "soft caps"),
        ("deepseek_v3", torch.bfloat16, "latent attention"),
    ],
)
def test_models_that_it_cannot_run_are_recognised_by_name(name: str, dtype: torch.dtype, reason: str) -> None:
    assert reason in str(model_refusal(random_model(shrunk(name), seed=3).to(dtype)))


@pytest.mark.parametrize(("version", "runs"), [("2.11.0+cu130", False), ("2.12.1", False), ("2.13.0+cpu", True)])
def test_versions_that_cannot_run_it_are_recognised_by_name(
    version: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model: Any = random_model(shrunk("llama"), seed=3).to(torch.bfloat16)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    why = f"torch {version} takes no num_splits with pages, which 2.13 and later do"
    assert refusal(model) == (None if runs else why)


@pytest.mark.skipif(torch_refusal(torch.__version__) is not None, reason="it is refused for this version")
def test_torchs_own_function_takes_what_is_passed() -> None:
    """By torch's meta kernel, which checks names and makes the output's shape; on CPU nothing can be computed."""
    table = KVPool(2, BLOCK_SIZE).new_table()
    table.reserve(30)
    plan = PagedPlan.build([Row.of(table, [1] * 30, 24, 6)], torch.device("cpu"), 97)
    query = torch.zeros(6, 4, 8, dtype=torch.bfloat16, device="meta")
    pages = torch.zeros(3, BLOCK_SIZE, 2, 8, dtype=torch.bfloat16, device="meta")
    for window in (None, 16):
        output = VarlenAttention().attend(query, pages, pages, plan, AttentionOptions(0.3, window=window))
        assert output.shape == query.shape and output.dtype == torch.bfloat16
