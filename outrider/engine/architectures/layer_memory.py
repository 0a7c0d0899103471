"""What a decoder layer keeps of a sequence between steps: one table for every class, read by the loader and the paths.

What is served is kept per token, in the blocks of the pool: keys and values, latents, an indexer's keys, the inputs of
a short convolution. Rollback, shared prefixes, copies, preemption and moves of such a layer are those of its blocks.
docs/layer-memory.md has the steps to add a kind.
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

RUNNING = "a running state that is not served yet"


Width = Callable[[PreTrainedConfig], int]
"""Returns how many numbers a layer keeps of a token, by the layer's configuration."""


def _attention_width(text: PreTrainedConfig) -> int:
    """Return the width of keys and values, or of the latents that they are made of."""
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
    """Keys and values are convolved, each with its inputs, and so is what enters the two halves of the layer."""
    return 2 * _attention_width(text) + 2 * int(text.hidden_size)


def _no_width(text: PreTrainedConfig) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Memory of the layers of one type, and what follows from it for the rows of a forward."""

    keeps: str
    """What is kept, as in "layers that keep ..."."""
    width: Width = _attention_width
    """About what a token weighs. Exactly, the storages of a path say once its layers have run."""
    is_per_token: bool = True
    """Whether all of it lies in the pool's blocks, token by token, so that a cut of the block table is a rollback.
    Anything else is a state of the whole sequence, which is not served."""
    packs_rows: bool = True
    """Whether the tokens of several sequences may lie in one line, which `paged` feeds."""
    has_columns_as_positions: bool = False
    """Whether a token's column counts as its position, so that the rows of a forward have to be equally long."""
    tree_refusal: str | None = None
    """Why its rows are no token trees, however well the self-test of trees goes; None where that test decides."""
    cache_method: str | None = None
    """Method of transformers' `Cache` that its layers call beside `update`; an old transformers may lack it."""
    test_limits: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the module that selects keys, with the values that the self-test sets: a limit of thousands of
    keys would select everything in a test of few tokens."""


_ATTENTION = LayerMemory("keys and values")
_CONVOLUTION_TREES = "a short convolution reads the tokens of the columns before, which in a tree may be siblings"
_HYBRID = LayerMemory(
    "keys and values, and the inputs of short convolutions",
    _hybrid_width,
    packs_rows=False,
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
        packs_rows=False,
        cache_method="update_indexer",
        test_limits={"index_topk": 16},
    ),
    "minimax_m3_sparse": LayerMemory(
        "keys and values, and the keys of an indexer that selects blocks",
        _indexed_width,
        packs_rows=False,
        has_columns_as_positions=True,
        tree_refusal="its indexer selects blocks of columns, which in a tree are no positions",
        test_limits={"block_size": 4, "topk_blocks": 4},
    ),
    "conv": LayerMemory(
        "the inputs of a short convolution",
        _hidden_width,
        packs_rows=False,
        tree_refusal=_CONVOLUTION_TREES,
        cache_method="update_conv_state",
    ),
    "hybrid": _HYBRID,
    "hybrid_sliding": _HYBRID,
    "dummy": LayerMemory("nothing: it has no attention, or reads another layer's keys and values", _no_width),
    "linear_attention": LayerMemory(RUNNING, is_per_token=False),
    "compressed_sparse_attention": _COMPRESSED,
    "heavily_compressed_attention": _COMPRESSED,
    "reference_sliding_attention": LayerMemory(
        "keys and values by where the prompt ended, which a step does not know", is_per_token=False
    ),
}
"""By transformers' name of the layer type."""
OLD_NAMES = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
"""Of transformers before 5.23, and today's."""


LIMITS = {"keep_window_size": 2, "floor_scale": 8}
"""Numbers of tokens after which modules of some classes compute otherwise, with what the self-test of 48 tokens sets:
Doge's choice of keys, and the scale of Llama 4's queries."""


def layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the type of each decoder layer, as transformers makes its own caches from a configuration."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:  # whose layers are not in the list of types, if it has one
        return ("full_attention",) * (getattr(text, "num_decoder_layers", None) or text.num_hidden_layers)
    types, _ = get_layer_types_and_kwargs(text)
    return tuple(OLD_NAMES.get(name, name) for name in types)


def layer_config(text: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """Return the configuration of one decoder layer: widths and windows may differ from layer to layer (Gemma 4), and
    transformers then refuses to name one for all. The list of a model with an encoder is of the encoder's layers.
    """
    layers = getattr(text, "per_layer_config", None)
    return layers[index] if layers and index < len(layers) else text


def memories(types: Sequence[str]) -> dict[str, LayerMemory]:
    """Return the memory of each of the types, once, in order; types that `memory_refusal` lets through."""
    return {name: KINDS[name] for name in dict.fromkeys(types)}


def token_width(config: PreTrainedConfig) -> int:
    """Return about how many numbers all layers keep of a token; of types that `memory_refusal` lets through."""
    text = config.get_text_config(decoder=True)
    return sum(KINDS[name].width(layer_config(text, index)) for index, name in enumerate(layer_types(config)))


def memory_refusal(types: Sequence[str], *, is_stateful: bool) -> str | None:
    """Return why layers of these types are not served, to follow the name of the class; None where they are.

    is_stateful: transformers' mark of classes that keep more than tokens' states, whatever their layers are called.
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
            return f"keeps {kind.keeps} ({name} layers); use a model of attention or short convolutions alone"
        if kind.cache_method is not None and not hasattr(Cache, kind.cache_method):
            return f"has {name} layers, for which transformers {version} has no cache; install a newer transformers"
    if is_stateful:
        hybrid = [name for name in ("hybrid", "hybrid_sliding") if name in types]
        of = f" ({hybrid[0]} layers)" if hybrid else ""
        return f"keeps {RUNNING}{of}; use a model of attention or short convolutions alone"
    return None


def packing_refusal(types: Sequence[str]) -> str | None:
    """Return why tokens of several sequences cannot lie in one line, or None when they can."""
    for name, kind in memories(types).items():
        if not kind.packs_rows:
            return f"its {name} layers keep {kind.keeps}, which needs each sequence in a row of its own"
    return None


def tree_refusal(types: Sequence[str]) -> str | None:
    """Return why rows are no token trees whatever a test says, or None when a test decides."""
    for name, kind in memories(types).items():
        if kind.tree_refusal is not None:
            return f"has {name} layers: {kind.tree_refusal}"
    return None


@contextmanager
def selecting_few_keys(model: PreTrainedModel, types: Sequence[str]) -> Iterator[None]:
    """Have the modules that select keys select as few as the kinds' `test_limits` say, for a self-test; what begins
    after a number of tokens, in any class, begins early.

    Raises PathUnavailable for a kind none of whose modules can be set.
    """
    changed: list[tuple[nn.Module, str, int]] = []
    try:
        for attribute, limit in LIMITS.items():
            for module in model.modules():
                if _has_all(module, {attribute: limit}):
                    changed.append((module, attribute, getattr(module, attribute)))
                    setattr(module, attribute, limit)
        for name, kind in memories(types).items():
            if not kind.test_limits:
                continue
            selectors = [each for each in model.modules() if _has_all(each, kind.test_limits)]
            if not selectors:
                names = " and ".join(kind.test_limits)
                raise PathUnavailable(f"no module of its {name} layers has {names}, with which they would be tested")
            for module in selectors:
                for attribute, limit in kind.test_limits.items():
                    before = getattr(module, attribute)
                    changed.append((module, attribute, before))
                    setattr(module, attribute, min(before, limit))
        yield
    finally:
        for module, attribute, before in changed:
            setattr(module, attribute, before)


def _has_all(module: Any, names: Mapping[str, int]) -> bool:
    return all(type(getattr(module, name, None)) is int for name in names)
