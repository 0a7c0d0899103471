"""What a decoder layer keeps of a sequence between steps: one table of layer types, read by the loader and the paths.

A layer is served if it keeps something of each token, in the blocks of the pool: keys and values, latents, an indexer's
keys, the inputs of a short convolution. Rollback, prefix caching, copies, preemption and moves of such a layer are
those of its blocks. docs/layer-memory.md has the steps to add a layer type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from outrider.engine.errors import PathUnavailable

RUNNING_STATE = "a running state that is not served yet"
"""Words for messages about layers that sum up the whole sequence in one state (Mamba, linear attention). Models with
such layers are not served."""

Width = Callable[[PreTrainedConfig], int]
"""Function from a layer's configuration to how many numbers (elements, not bytes) the layer's cache holds for one
token."""


def _attention_width(text: PreTrainedConfig) -> int:
    # Of keys and values, or of the latents from which they are computed.
    latent = getattr(text, "kv_lora_rank", None)
    if latent is not None:
        return int(latent + text.qk_rope_head_dim)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * heads * head_dim)


def _indexed_width(text: PreTrainedConfig) -> int:
    return _attention_width(text) + int(text.index_head_dim)


def _hidden_width(text: PreTrainedConfig) -> int:
    return int(text.hidden_size)


def _hybrid_width(text: PreTrainedConfig) -> int:
    # Keys and values, the inputs of a convolution of each, and those of one at the start of the layer's two halves.
    return 2 * _attention_width(text) + 2 * int(text.hidden_size)


def _no_width(text: PreTrainedConfig) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What the layers of one type keep in the cache between steps, and which batches they can run."""

    kept_states: str
    """What the layers keep between steps, in words that follow "keeps" in a message."""
    width: Width = _attention_width
    """Function that estimates how many numbers a layer keeps for a token. The storages of an attention path have the
    exact number, once the layers have run."""
    is_per_token: bool = True
    """Whether everything that the layers keep lies in blocks of the KV cache, token by token, so that truncating the
    block table rolls a layer back. False = a layer keeps states that are not per token, and the model is refused."""
    is_packable: bool = True
    """Whether the tokens of several sequences may be fed as one long sequence, as the `paged` path does."""
    has_columns_as_positions: bool = False
    """Whether transformers' code for these layers takes a token's column in the batch for its position. All sequences
    of a forward must then have the same length."""
    tree_refusal: str | None = None
    """Reason why the layers run no token trees, whatever the self-test of trees finds; None = that test decides."""
    cache_method: str | None = None
    """Method of transformers' `Cache` that the layers call in addition to `update`, and that an old transformers may
    not have; None = they call no other."""
    test_limits: Mapping[str, int] = field(default_factory=dict)
    """By the name of a module's attribute, the value that the self-test sets. The attributes limit how many keys a
    module selects; a short self-test would never reach a model's own limit of thousands of keys."""


_ATTENTION = LayerMemory("keys and values")
_CONVOLUTION_TREES = "a short convolution reads the tokens of the columns before, which in a tree may be siblings"
_HYBRID = LayerMemory(
    "keys and values, and the inputs of short convolutions",
    _hybrid_width,
    is_packable=False,
    has_columns_as_positions=True,
    tree_refusal=_CONVOLUTION_TREES,
    cache_method="update_conv_state",
)
_COMPRESSED = LayerMemory(
    "compressed keys and the tokens that are not compressed yet, a state that is not served yet", is_per_token=False
)

KINDS: Mapping[str, LayerMemory] = {
    "full_attention": _ATTENTION,
    "sliding_attention": _ATTENTION,  # every token is kept: a ring cannot go back
    "chunked_attention": _ATTENTION,
    "indexed_attention": LayerMemory(
        "keys and values (or latents), and the keys of a sparse indexer",
        _indexed_width,
        is_packable=False,
        cache_method="update_indexer",
        test_limits={"index_topk": 16},
    ),
    "minimax_m3_sparse": LayerMemory(
        "keys and values, and the keys of an indexer that selects blocks",
        _indexed_width,
        is_packable=False,
        has_columns_as_positions=True,
        tree_refusal="its indexer selects blocks of columns, which in a tree are no positions",
        test_limits={"block_size": 4, "topk_blocks": 4},
    ),
    "conv": LayerMemory(
        "the inputs of a short convolution",
        _hidden_width,
        is_packable=False,
        tree_refusal=_CONVOLUTION_TREES,
        cache_method="update_conv_state",
    ),
    "hybrid": _HYBRID,
    "hybrid_sliding": _HYBRID,
    "dummy": LayerMemory("nothing: it has no attention, or reads another layer's keys and values", _no_width),
    "linear_attention": LayerMemory(RUNNING_STATE, is_per_token=False),
    "compressed_sparse_attention": _COMPRESSED,
    "heavily_compressed_attention": _COMPRESSED,
    "reference_sliding_attention": LayerMemory(
        "keys and values by where the prompt ended, which a step does not know", is_per_token=False
    ),
}
"""For each layer type, by transformers' name of it, what layers of this type keep between steps."""
OLD_NAMES = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
"""Current name of a layer type, by its name in transformers before 5.23."""

TEST_LIMITS = {"keep_window_size": 2, "floor_scale": 8}
"""By the name of a module's attribute, the value that the self-test sets. The attributes are numbers of tokens after
which a module computes differently: Doge's selection of keys, and the scale of Llama 4's queries. The self-test feeds
at most 48 tokens, too few to reach a model's own values."""


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the type of each decoder layer, derived from a configuration as transformers does for its own caches."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:  # its list of types, if it has one, is of the encoder
        return ("full_attention",) * (getattr(text, "num_decoder_layers", None) or text.num_hidden_layers)
    types, _ = get_layer_types_and_kwargs(text)
    return tuple(OLD_NAMES.get(name, name) for name in types)


def layer_config(text: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """Return the configuration of the decoder layer `index`. If layers have no configurations of their own, this is the
    text model's configuration `text`.

    Widths and windows may differ from layer to layer (Gemma 4); transformers then refuses to return one value for all
    layers.
    """
    layers = getattr(text, "per_layer_config", None)
    if not layers or index >= len(layers):
        return text
    config: PreTrainedConfig = layers[index]
    return config


def memories(types: Sequence[str]) -> dict[str, LayerMemory]:
    """Return the `LayerMemory` of each of these layer types, by type, in the order in which the types first occur.
    types: layer types that `memory_refusal` accepts.
    """
    return {name: KINDS[name] for name in dict.fromkeys(types)}


def token_width(config: PreTrainedConfig) -> int:
    """Return roughly how many numbers (elements, not bytes) the caches of all layers together hold for one token. Call
    it only for a configuration whose layer types `memory_refusal` accepts.
    """
    text = config.get_text_config(decoder=True)
    return sum(KINDS[name].width(layer_config(text, index)) for index, name in enumerate(layer_types(config)))


def memory_refusal(types: Sequence[str], *, is_stateful: bool) -> str | None:
    """Return the reason why layers of these types are not served, a clause to follow the name of the class; None if
    they are served.

    is_stateful: value of `_is_stateful`, by which transformers marks classes that keep a running state. Such classes
    are refused whatever their layer types.
    """
    version = transformers.__version__
    for name in dict.fromkeys(types):
        kind = KINDS.get(name)
        if kind is None:
            return (
                f"has {name} layers (transformers {version}), whose memory is not known here and was not tested; use "
                "another model"
            )
        if not kind.is_per_token:
            return f"keeps {kind.kept_states} ({name} layers); use a model of attention or short convolutions alone"
        if kind.cache_method is not None and not hasattr(Cache, kind.cache_method):
            return f"has {name} layers, for which transformers {version} has no cache; install a newer transformers"
    if is_stateful:
        layers = ""
        if "hybrid" in types:
            layers = " (hybrid layers)"
        elif "hybrid_sliding" in types:
            layers = " (hybrid_sliding layers)"
        return f"keeps {RUNNING_STATE}{layers}; use a model of attention or short convolutions alone"
    return None


def packing_refusal(types: Sequence[str]) -> str | None:
    """Return why layers of these types cannot run several sequences as one long one; None if they can."""
    for name, kind in memories(types).items():
        if not kind.is_packable:
            return f"its {name} layers keep {kind.kept_states}, which needs each sequence in a row of its own"
    return None


def tree_refusal(types: Sequence[str]) -> str | None:
    """Return why layers of these types run no token trees, whatever a self-test finds; None = the self-test decides."""
    for name, kind in memories(types).items():
        if kind.tree_refusal is not None:
            return f"has {name} layers: {kind.tree_refusal}"
    return None


@contextmanager
def selecting_few_keys(model: PreTrainedModel, types: Sequence[str]) -> Iterator[None]:
    """Context manager in which limits of a model's modules are lowered, so that a self-test of few tokens reaches them:
    attention that selects 2048 keys, for example, selects only a few.

    The lowered limits are the `test_limits` of these layer types and, in modules of every class, TEST_LIMITS. Raises
    PathUnavailable for a layer type if no module has the attributes that its `test_limits` name.
    """
    changed: list[tuple[nn.Module, str, int]] = []
    try:
        for attribute, limit in TEST_LIMITS.items():
            for module in model.modules():
                if _has_all(module, {attribute: limit}):
                    changed.append((module, attribute, getattr(module, attribute)))
                    setattr(module, attribute, limit)
        for name, kind in memories(types).items():
            if not kind.test_limits:
                continue
            selectors = [module for module in model.modules() if _has_all(module, kind.test_limits)]
            if not selectors:
                names = " and ".join(kind.test_limits)
                raise PathUnavailable(f"no module of its {name} layers has {names}, with which they would be tested")
            for module in selectors:
                for attribute, limit in kind.test_limits.items():
                    value = getattr(module, attribute)
                    changed.append((module, attribute, value))
                    setattr(module, attribute, min(value, limit))
        yield
    finally:
        for module, attribute, value in changed:
            setattr(module, attribute, value)


def _has_all(module: Any, names: Mapping[str, int]) -> bool:
    return all(type(getattr(module, name, None)) is int for name in names)
