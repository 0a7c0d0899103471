"""Take a transformers model's sizes, weights and rotary tables for the fused path. Called by `fused`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.loading.quantize import Int8Linear
from outrider.engine.model_runner import ModelFacts
from outrider.engine.native.build import BuildError
from outrider.engine.native.library import NO_LAYER, Kind, NativeModel, NativeSpec, RowPart, Vector, Which
from outrider.engine.paths.block_cache import layer_limits
from outrider.engine.paths.forward_path import PathUnavailable

CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes that the path runs, compared by name: a subclass may compute something else."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose tables do not depend on how long a sequence is."""
KINDS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16}
MOST_HEAD_SIZE = 256
"""Columns of a head."""


@dataclass(frozen=True, slots=True)
class FusedShape:
    """The sizes of a model that the fused path runs."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    context: int
    """Tokens, as served; no more than the model was made for."""
    epsilon: float
    attention_scale: float
    dtype: torch.dtype
    windows: tuple[int, ...]
    """Keys that each layer's queries see, 0 for all."""
    is_int8: bool
    """Whether the linear layers, head included, are `Int8Linear`."""
    head_rows: int
    """Logits of a token."""
    is_paired: bool = False
    """Whether layer 0 reads a row of the caller's beside the token's embedding."""

    @classmethod
    def of(cls, model: PreTrainedModel, facts: ModelFacts) -> FusedShape:
        """Return the model's sizes. Raises PathUnavailable for a model that this path does not run."""
        config = model.config
        _check(model, config)
        attention = model.model.layers[0].self_attn
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=attention.head_dim,
            intermediate=config.intermediate_size,
            vocab=facts.vocab_size,
            context=facts.context_limit,
            epsilon=config.rms_norm_eps,
            attention_scale=attention.scaling,
            dtype=model.dtype,
            windows=tuple(layer_limits(config, layer)[0] or 0 for layer in range(config.num_hidden_layers)),
            is_int8=isinstance(model.lm_head, Int8Linear),
            head_rows=facts.vocab_size,
        )


def _check(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise PathUnavailable for the first thing that this path does not compute."""
    if type(model).__name__ not in CLASSES:
        raise PathUnavailable(f"is made for {', '.join(CLASSES)}")
    rope, head_size = config.rope_parameters["rope_type"], model.model.layers[0].self_attn.head_dim
    reasons = [
        (model.device.type != "cpu", f"is made for cpu, not {model.device.type}"),
        (model.dtype not in KINDS, f"is made for float32 and bfloat16, not {model.dtype}"),
        (not _is_plain(model), "is made for whole weights of one dtype, or int8"),
        (getattr(config, "hidden_act", None) != "silu", f"is made for silu, not {getattr(config, 'hidden_act', None)}"),
        (rope not in ROPE_TYPES, f"is made for the rope types {', '.join(ROPE_TYPES)}, not {rope}"),
        (head_size % 8 != 0 or head_size > MOST_HEAD_SIZE, f"is made for heads of 8, 16, .. 256, not {head_size}"),
    ]
    for holds, reason in reasons:
        if holds:
            raise PathUnavailable(reason)


def _is_plain(model: PreTrainedModel) -> bool:
    """Return whether every linear layer is of the head's kind, and everything else in the model's dtype."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear | Int8Linear)]
    rounded = {id(module.weight) for module in linears if isinstance(module, Int8Linear)}
    return len({type(module) for module in linears}) == 1 and all(
        type(weight.data) is Tensor and (weight.dtype == model.dtype or id(weight) in rounded)
        for weight in model.parameters()
    )


def pack_weights(body: Any, lm_head: nn.Module, shape: FusedShape) -> tuple[NativeModel, Tensor]:
    """Return the packed model and the embedding [V, H] in the model's dtype. Raises PathUnavailable.

    body: the module that has embed_tokens, layers, norm and rotary_emb.
    """
    try:
        native = _pack(body, lm_head, shape)
    except (BuildError, MemoryError) as error:
        raise PathUnavailable(str(error)) from error
    return native, body.embed_tokens.weight.detach().contiguous()


def _pack(body: Any, lm_head: Any, shape: FusedShape) -> NativeModel:
    """Return the packed model. Raises PathUnavailable, BuildError, MemoryError."""
    spec = NativeSpec(
        *(shape.num_layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_size, shape.intermediate),
        *(shape.vocab, shape.head_rows, shape.is_paired),
        *(KINDS[shape.dtype], Kind.INT8 if shape.is_int8 else KINDS[shape.dtype]),
        torch.get_num_threads(),
        *(shape.epsilon, shape.attention_scale),
    )
    assert ctypes.sizeof(spec) == 14 * 4
    native = NativeModel(spec, list(shape.windows))
    for index, layer in enumerate(body.layers):
        _pack_layer(native, index, layer, shape)
    _pack_linear(native, NO_LAYER, Which.HEAD, lm_head)
    native.vector(NO_LAYER, Vector.LAST_NORM, body.norm.weight)
    cosine, sine = _rotary_tables(body, shape)
    native.vector(NO_LAYER, Vector.COSINE, cosine)
    native.vector(NO_LAYER, Vector.SINE, sine)
    return native


def _pack_layer(native: NativeModel, index: int, layer: Any, shape: FusedShape) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    _pack_linear(native, index, Which.QKV, attention.q_proj)
    _pack_linear(native, index, Which.QKV, attention.k_proj, queries)
    _pack_linear(native, index, Which.QKV, attention.v_proj, queries + keys)
    _pack_linear(native, index, Which.OUT, attention.o_proj)
    _pack_linear(native, index, Which.GATE_UP, mlp.gate_proj, part=RowPart.GATE)
    _pack_linear(native, index, Which.GATE_UP, mlp.up_proj, part=RowPart.UP)
    _pack_linear(native, index, Which.DOWN, mlp.down_proj)
    native.vector(index, Vector.ATTENTION_NORM, layer.input_layernorm.weight)
    native.vector(index, Vector.MLP_NORM, layer.post_attention_layernorm.weight)
    if hasattr(getattr(attention, "q_norm", None), "weight"):
        native.vector(index, Vector.QUERY_NORM, attention.q_norm.weight)
        native.vector(index, Vector.KEY_NORM, attention.k_norm.weight)


def _pack_linear(
    native: NativeModel,
    layer: int,
    which: Which,
    linear: nn.Linear | Int8Linear,
    first: int = 0,
    part: RowPart = RowPart.STRAIGHT,
) -> None:
    if isinstance(linear, Int8Linear):
        native.pack(layer, which, linear.weight, first, part, linear.scale)
    else:
        native.pack(layer, which, linear.weight, first, part)
    if linear.bias is not None:
        native.bias(layer, which, linear.bias, first, part)


@torch.inference_mode()
def _rotary_tables(body: Any, shape: FusedShape) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each [context, head_size / 2] float32, from the model's own rotary module."""
    positions = torch.arange(shape.context)[None]
    cosine, sine = body.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)  # [1, context, head_size]
    half = shape.head_size // 2
    if cosine.shape[-1] != shape.head_size or not torch.equal(cosine[..., :half], cosine[..., half:]):
        raise PathUnavailable(f"is made for rotation of the whole head by halves, not of {cosine.shape[-1]} columns")
    return cosine[0, :, :half], sine[0, :, :half]
