"""Every kind of memory is served with the logits of a forward without cache, and refused where its cache is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.architectures.layer_memory import KINDS, LayerMemory, layer_types, memory_refusal, token_width
from outrider.engine.attention.block_cache import BlockLayer, num_decoder_layers
from outrider.engine.attention.dense import DenseLayer
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.attention_choice import choose_path
from outrider.engine.loading.loader import read_config
from outrider.engine.model_facts import ModelFacts
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from tests.memory_kinds import SHAPES, config_of
from tests.rounds import largest_error, some_ids, truth_of
from tests.tiny_models import random_model

TOLERANCE = 1e-4
"""Largest logit difference, float32."""
EVERY_DAY = ("indexer", "block indexer", "convolution", "convolutions beside attention", "shared keys and values")
"""Those whose memory no class of `tests.zoo` has."""
CHAINS = ("block indexer", "convolution", "convolution and window", "convolutions beside attention")
"""Those whose rows cannot be trees."""

IS_OLD = Version(transformers.__version__) < Version("5.23")


def facts_of(model: PreTrainedModel) -> ModelFacts:
    own: dict[str, Any] = {"num_layers": num_decoder_layers(model.config), "layer_types": layer_types(model.config)}
    own["hidden_size"] = model.config.get_text_config(decoder=True).hidden_size
    return ModelFacts("tiny", 97, 128, "float32", "cpu", (), 0, **own)


def model_of(kind: str) -> PreTrainedModel:
    return random_model(config_of(kind), seed=3)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in EVERY_DAY else pytest.mark.slow) for kind in SHAPES]
)
def test_rounds_and_rollbacks_equal_a_forward_without_cache(kind: str) -> None:
    model = model_of(kind)
    runner = choose_path(model, facts_of(model), "auto", False)
    runner.set_pool(KVPool(64, runner.path.block_size))
    assert largest_error(runner, truth_of(model)) < TOLERANCE
    assert (runner.tree_refusal is not None) == (kind in CHAINS), runner.tree_refusal


@pytest.mark.skipif(IS_OLD, reason="its latent attention keeps keys and values")
def test_a_token_weighs_all_that_its_layers_keep() -> None:
    """In bytes: float32 latents of 16 and 8 and indexer keys of 16 in each of two layers; keys and values of two heads
    of 8 in two layers of attention, and inputs of 32 in two of convolutions; nothing in a layer that shares.
    """
    weights = {"indexer": 2 * 4 * (16 + 8 + 16), "convolution": 2 * 4 * (2 * 2 * 8 + 32), "shared keys and values": 384}
    for kind, num_bytes in weights.items():
        model = model_of(kind)
        assert choose_path(model, facts_of(model), "dense", False).kv_bytes_per_token == num_bytes, kind
        assert 4 * token_width(model.config) == num_bytes, "by the configuration alone, as `doctor` says"


def one_column_off(self: DenseLayer, storage: Tensor, first: int) -> Tensor:
    columns = read(self, storage, first)
    return columns.roll(1, dims=2) if _is_more(self, storage) else columns


def only_of_long_steps(self: DenseLayer, storage: Tensor, states: Tensor) -> None:
    if self.plan.num_queries > 3 or not _is_more(self, storage):
        write(self, storage, states)


def keys_and_values_alone(self: BlockLayer, copies: Any) -> None:
    more, self.more = self.more, {}
    copy_blocks(self, copies)
    self.more = more


read, write, copy_blocks = DenseLayer._read, DenseLayer._write, BlockLayer.copy_blocks


def _is_more(layer: BlockLayer, storage: Tensor) -> bool:
    return any(storage is each for each in layer.more.values())


@pytest.mark.parametrize(
    ("name", "fault"),
    [("_read", one_column_off), ("_write", only_of_long_steps), ("copy_blocks", keys_and_values_alone)],
)
@pytest.mark.parametrize("kind", ["indexer", "convolution"])
def test_the_self_test_finds_a_cut_or_a_share_that_forgets_what_a_layer_keeps(
    kind: str, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And names the layer that keeps it. The indexer of the model keeps more keys than the test has tokens."""
    changes = {"index_topk": 2048} if kind == "indexer" else {}
    model = random_model(config_of(kind, **changes), seed=3)
    monkeypatch.setattr(DenseLayer, name, fault)
    layer = {"indexer": "indexed_attention", "convolution": "conv"}[kind]
    with pytest.raises(ConfigError, match=rf"dense: computes other logits .*, first in layer 0 \({layer}\): largest"):
        choose_path(model, facts_of(model), "dense", False)
    if kind == "indexer":
        assert {module.index_topk for module in model.modules() if hasattr(module, "index_topk")} == {2048}


def test_a_prefix_is_shared_with_all_that_its_layers_keep() -> None:
    """A second prompt adopts the first one's blocks, is cut inside the last of them and goes on by itself."""
    model = model_of("convolution")
    runner, truth = choose_path(model, facts_of(model), "dense", False), truth_of(model)
    first, ids = some_ids(40, 97, 1), some_ids(40, 97, 2)
    own, other = runner.pool.new_table(), runner.pool.new_table()
    runner.forward([Row.of(own, first, 0, 0)])
    runner.pool.prefix.publish(own, first)
    assert runner.pool.prefix.adopt(other, first) == 32
    other.truncate(27)
    ids[:27] = first[:27]
    logits = runner.forward([Row.of(other, ids, 27, 13), Row.of(own, [*first, 5], 40, 1)])
    assert float((logits[:13] - truth(ids)[27:]).abs().max()) < TOLERANCE
    assert float((logits[13:] - truth([*first, 5])[40:]).abs().max()) < TOLERANCE


def test_a_class_that_fails_is_refused_with_the_layer_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Tensor:
        raise ValueError("no such state")

    model = model_of("convolution")
    monkeypatch.setattr(DenseLayer, "update_conv_state", fail)
    with pytest.raises(ConfigError, match=r"on this cache, first in layer 0 \(conv\): ValueError: no such state"):
        choose_path(model, facts_of(model), "dense", False)


def test_what_is_not_in_the_table_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = memory_refusal(["full_attention", "quantum"], is_stateful=False)
    assert refusal is not None and refusal.startswith(
        f"has quantum layers (transformers {transformers.__version__}), whose"
    )
    monkeypatch.setitem(KINDS, "conv", LayerMemory("inputs", cache_method="update_later"))  # type: ignore[index]
    refusal = memory_refusal(["conv"], is_stateful=False)
    assert refusal is not None and f"transformers {transformers.__version__} has no cache; install a newer" in refusal


def test_a_class_that_transformers_lacks_is_refused_with_the_version(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_next_year", "architectures": ["OfNextYearForCausalLM"]}')
    with pytest.raises(ConfigError, match=rf"with transformers {transformers.__version__}: .*`of_next_year`"):
        read_config(str(tmp_path))


def test_an_indexer_that_the_self_test_cannot_narrow_is_refused() -> None:
    model = model_of("indexer")
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = torch.tensor(4)
    with pytest.raises(ConfigError, match="no module of its indexed_attention layers has index_topk"):
        choose_path(model, facts_of(model), "dense", False)
