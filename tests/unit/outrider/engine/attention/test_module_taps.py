"""Taps: what a forward gives beside its logits is transformers' hidden states, on every path and however rows are cut.

Every architecture's taps are in test_architectures.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from outrider.engine.attention import module_taps
from outrider.engine.attention.forward_path import NORMED
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.attention_choice import FACTORIES, choose_path, features_refusal
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.native.library import NativeModel
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest
from outrider.wire.settings.config import DraftConfig, TargetConfig
from tests.native import skip_without_library
from tests.rounds import some_ids, some_parents
from tests.tiny_models import random_model, tiny_llama
from tests.zoo import MIXED, SHAPE, WINDOW

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""Largest difference of a hidden state, as a share of its length."""
VOCAB_SIZE, CONTEXT = 97, 128
DEEP = {**SHAPE, "num_hidden_layers": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", DEEP),
    "odd sizes": ("llama", {**DEEP, "hidden_size": 40, "head_dim": 24, "intermediate_size": 101}),
    "window": ("mistral", {**DEEP, **WINDOW}),
    "qwen3": ("qwen3", {**DEEP, "head_dim": 16}),
    "gpt2": ("gpt2", {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "gemma with windows": ("gemma3_text", {**SHAPE, **MIXED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "norm before the layers": ("opt", {**DEEP, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 4}),
}
CASES = [
    *(("fused", name) for name in ("llama", "odd sizes", "window", "qwen3", "gemma with windows")),
    *(("paged", name) for name in ("llama", "qwen3", "gpt2", "gemma with windows")),
    *(("dense", name) for name in ("llama", "window", "gemma with windows", "norm before the layers")),
]


@lru_cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    family, options = FAMILIES[name]
    return random_model(CONFIG_MAPPING[family](**options), seed=5).to(dtype).eval()


def facts_of(model: PreTrainedModel) -> ModelFacts:
    dtype, config = str(model.dtype).removeprefix("torch."), model.config
    layers = {"num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size}
    return ModelFacts("tiny", VOCAB_SIZE, CONTEXT, dtype, "cpu", (0,), 0, **layers)


def runner_of(path: str, name: str, dtype: torch.dtype = torch.float32) -> ModelRunner:
    """One that serves everything, tested or not."""
    if path == "fused":
        skip_without_library()
    model = model_of(name, dtype)
    facts = facts_of(model)
    forward = FACTORIES[path](model, facts)
    runner = ModelRunner(forward, facts, KVPool(128, forward.block_size), torch.device("cpu"))
    runner.tree_refusal = runner.features_refusal = None
    return runner


def error(features: Tensor, truth: Tensor) -> float:
    """Both [T, taps, H]."""
    return float(((features.float() - truth).norm(dim=-1) / truth.norm(dim=-1)).max())


def given(runner: ModelRunner, rows: list[Row]) -> list[Tensor]:
    """Feed the rows -> the features of each [num_new, taps, H]."""
    runner.forward(rows)
    return list(runner.features.split([row.num_new for row in rows]))


@pytest.mark.parametrize(
    ("path", "name", "dtype"),
    [
        *((*case, torch.float32) for case in CASES),
        *((path, name, torch.bfloat16) for path, name in CASES if name in ("llama", "odd sizes")),
    ],
)
def test_features_are_the_hidden_states_of_transformers(path: str, name: str, dtype: torch.dtype) -> None:
    """Pieces of prompts, decodes, verifies, a rollback, a token tree in two feeds and what follows a kept path."""
    runner, truth = runner_of(path, name, dtype), UncachedModel(model_of(name, dtype))
    num_layers = runner.facts.num_layers
    taps = [1, NORMED, num_layers, 0]
    runner.set_taps(taps)
    a, b, c = (some_ids(60, VOCAB_SIZE, seed) for seed in range(3))
    tables = [runner.pool.new_table() for _ in range(3)]

    def expected(ids: list[int], begin: int) -> Tensor:
        return truth.hidden_states(ids)[begin:, [tap if tap != NORMED else num_layers + 1 for tap in taps]]

    errors, ends = list[float](), [0, 0, 0]
    # Dense splits the first step's rows into groups, and feeds cached tokens again in the others.
    for step in ([(0, 25, 0), (1, 3, 1)], [(1, 4, 1), (0, 31, 6), (2, 20, 0)], [(2, 22, 1), (0, 32, 1), (1, 9, 5)]):
        rows = [Row.of(tables[i], (a, b, c)[i][:end], ends[i], logits) for i, end, logits in step]
        for row, features, (i, end, _) in zip(rows, given(runner, rows), step, strict=True):
            assert features.shape == (row.num_new, len(taps), runner.facts.hidden_size)
            assert features.dtype == (torch.float32 if path == "fused" else dtype)
            errors.append(error(features, expected((a, b, c)[i][:end], ends[i])))
            ends[i] = end
    tables[0].truncate(28)
    a[28:] = some_ids(32, VOCAB_SIZE, 9)
    nodes, parents = some_ids(12, VOCAB_SIZE, 7), some_parents(12, 3)
    parts = given(runner, [Row(tables[0], nodes[:7], 28, 2, a[:28], parents[:7]), Row.of(tables[1], b[:10], 9, 1)])
    errors.append(error(parts[1], expected(b[:10], 9)))
    second = Row(tables[0], nodes[7:], 35, 5, [*a[:28], *nodes[:7]], parents)
    tree = torch.cat([parts[0], *given(runner, [second])])
    for node in range(12):
        way = [node]
        while parents[way[0]] >= 0:
            way.insert(0, parents[way[0]])
        chain = [*a[:28], *(nodes[each] for each in way)]
        errors.append(error(tree[way], expected(chain, 28)))
    runner.compact(second, way)
    chain += some_ids(3, VOCAB_SIZE, 4)
    row = Row.of(tables[0], chain, len(chain) - 3, 1)
    errors.append(error(given(runner, [row])[0], expected(chain, len(chain) - 3)))
    assert torch.tensor(errors).max() < TOLERANCE[dtype], errors


@pytest.mark.parametrize("path", ["fused", "paged", "dense"])
def test_taps_change_no_bit_of_the_logits_and_leave_nothing_behind(path: str) -> None:
    runner = runner_of(path, "llama")
    ids = some_ids(40, VOCAB_SIZE, 1)

    def logits(taps: list[int]) -> Tensor:
        runner.set_taps(taps)
        tables = [runner.pool.new_table() for _ in range(2)]
        rows = [Row.of(tables[0], ids[:30], 0, 30), Row.of(tables[1], ids, 0, 2)]
        found = runner.forward(rows)
        for table in tables:
            table.free()
        return found

    plain = logits([])
    assert runner.features.numel() == 0
    for taps in ([0, 3, NORMED], [2], [], [1, 1]):
        assert torch.equal(logits(taps), plain)
        assert runner.features.shape[:2] == ((70, len(taps)) if taps else (0,))
    before = runner.features
    assert torch.equal(before[:, 0], before[:, 1])
    kept = before.clone()
    logits([1, 1])
    assert torch.equal(before, kept), "a later forward writes elsewhere"
    runner.set_taps([])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model_of("llama").modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fused_features_have_the_same_bits_with_any_number_of_threads(
    dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """More tokens than a piece of work copies, so that threads share them."""
    found, ids = list[Tensor](), some_ids(120, VOCAB_SIZE, 1)
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        runner = runner_of("fused", "odd sizes", dtype)
        runner.set_taps([0, 1, 2, 3, NORMED])
        for cuts in ([120], [50, 5, 1, 64]):
            table, parts, end = runner.pool.new_table(), list[Tensor](), 0
            for cut in cuts:
                parts += given(runner, [Row.of(table, ids[: end + cut], end, 1)])
                end += cut
            found.append(torch.cat(parts))
    assert all(torch.equal(one, found[0]) for one in found)


# What the self-test finds.


@pytest.mark.parametrize(("path", "name"), [("fused", "llama"), ("paged", "gpt2"), ("dense", "norm before the layers")])
@pytest.mark.parametrize("fault", ["one layer late", "not normed", "normed twice"])
def test_a_planted_fault_is_refused_and_the_path_serves_on(
    path: str, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "fused":
        skip_without_library()
    model = model_of(name)
    facts = facts_of(model)

    def other(taps: list[int]) -> list[int]:
        last = facts.num_layers
        if fault == "one layer late":
            return [min(tap + 1, last) if tap != NORMED else tap for tap in taps]
        return [{"not normed": {NORMED: last}, "normed twice": {last: NORMED}}[fault].get(tap, tap) for tap in taps]

    for owner, setter in ((module_taps.ModuleTaps, "set"), (NativeModel, "taps")):
        right = getattr(owner, setter)
        monkeypatch.setattr(owner, setter, lambda self, taps, right=right: right(self, other(list(taps))))
    runner = choose_path(model, facts, path, False, True)
    assert runner.features_refusal is not None
    assert runner.features_refusal.startswith("gives other hidden states than transformers: largest difference ")
    with pytest.raises(InvalidRequest, match=f"the {path} path of tiny gives no features: gives other hidden states"):
        runner.set_taps([0])
    runner.set_taps([])
    logits = runner.forward([Row.of(runner.pool.new_table(), [1, 2, 3], 0, 3)])
    assert torch.allclose(logits, UncachedModel(model).forward([1, 2, 3]), atol=1e-4)


@pytest.mark.parametrize("path", ["fused", "paged", "dense"])
def test_rows_in_another_order_are_found(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(path, "llama")
    owner = type(runner)
    monkeypatch.setattr(owner, "features", property(lambda self: self.path.features.roll(1, 0)))
    refusal = features_refusal(runner, UncachedModel(model_of("llama")))
    assert refusal is not None and "gives other hidden states" in refusal


def test_a_class_without_a_list_of_its_layers_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    facts = facts_of(model)

    def none(model: PreTrainedModel) -> Any:
        raise LookupError("LlamaForCausalLM has no list of its 3 layers")

    monkeypatch.setattr(module_taps, "decoder_layers", none)
    runner = choose_path(model, facts, "paged", False, True)
    assert runner.features_refusal == "cannot be tapped: LookupError: LlamaForCausalLM has no list of its 3 layers"
    runner.allocate()  # its forward records nothing


def test_a_target_is_tested_and_a_draft_is_not(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, vocab_size=300)
    options: dict[str, Any] = {"device": "cpu", "kv_cache_tokens": 256, "max_slots": 1, "attention_path": "paged"}
    target = load_runner(TargetConfig(model=folder, **options))
    assert (target.facts.num_layers, target.facts.hidden_size, target.features_refusal) == (2, 32, None)
    target.set_taps([0, 2, NORMED])
    for bad in (3, -2):
        with pytest.raises(InvalidRequest, match=rf"tap {bad} is outside the layers of .*: taps are 0 to 2, and -1"):
            target.set_taps([0, bad])
    assert given(target, [Row.of(target.pool.new_table(), [1, 2], 0, 1)])[0].shape == (2, 3, 32)
    draft = load_runner(DraftConfig(model=folder, **options))
    with pytest.raises(InvalidRequest, match="gives no features: nobody has tried it"):
        draft.set_taps([0])
