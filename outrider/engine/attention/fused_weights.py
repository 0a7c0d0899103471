"""Take a transformers model's sizes, weights and rotary tables for the fused path. Called by `fused`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.attention.block_cache import declared, layer_limits
from outrider.engine.errors import PathUnavailable
from outrider.engine.model_facts import ModelFacts
from outrider.engine.native.build import BuildError
from outrider.engine.native.library import NO_LAYER, Activation, Kind, NativeModel, NativeSpec, RowPart, Vector, Which
from outrider.engine.quantization.quantize import Int8Linear

CLASSES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma3ForCausalLM",
)
"""Classes that the path runs, compared by name: a subclass may compute something else."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types whose tables do not depend on how long a sequence is."""
ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU}
KINDS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16}
MOST_HEAD_SIZE = 256
"""Columns of a head."""
MIN_TABLE_BYTES = 64 << 20
"""Bytes that rotary tables may take beside weights of fewer: those of 131,072 tokens and heads of 128 columns."""


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
    """Ids that may be fed."""
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
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    rotary_kinds: tuple[str | None, ...] = ()
    """Each layer's type, where the rotary tables go by it; empty where there is one for all."""
    is_paired: bool = False
    """Whether layer 0 reads a row of the caller's beside the token's embedding."""

    @classmethod
    def of(cls, model: PreTrainedModel, body: Any, facts: ModelFacts) -> FusedShape:
        """Return the model's sizes. body: the module that has its layers.

        Raises PathUnavailable for a model that this path does not run.
        """
        config = model.config
        attention, embedding = body.layers[0].self_attn, body.embed_tokens
        _check(model, config, attention.head_dim)
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=attention.head_dim,
            intermediate=config.intermediate_size,
            vocab=facts.num_ids,
            context=facts.context_limit,
            epsilon=config.rms_norm_eps,
            attention_scale=attention.scaling,
            dtype=model.dtype,
            windows=tuple(layer_limits(config, layer)[0] or 0 for layer in range(config.num_hidden_layers)),
            is_int8=isinstance(model.lm_head, Int8Linear),
            head_rows=facts.vocab_size,
            activation=ACTIVATIONS[_activation(config)],
            # rounded as transformers does before it multiplies
            embedding_scale=float(embedding.embed_scale.to(model.dtype)) if hasattr(embedding, "embed_scale") else 1.0,
            rotary_kinds=() if "rope_type" in config.rope_parameters else tuple(config.layer_types),
        )


def _check(model: PreTrainedModel, config: PreTrainedConfig, head_size: int) -> None:
    """Raise PathUnavailable for the first thing that this path does not compute."""
    activation, limits = _activation(config), _limits(config)
    ropes = [rope["rope_type"] for rope in _ropes(config)]
    reasons = [
        (model.device.type != "cpu", f"is made for cpu, not {model.device.type}"),
        (model.dtype not in KINDS, f"is made for float32 and bfloat16, not {model.dtype}"),
        (not _is_plain(model), "is made for whole weights of one dtype, or int8"),
        (activation not in ACTIVATIONS, f"is made for {' and '.join(ACTIVATIONS)}, not {activation}"),
        (bool(limits), f"is made for causal attention without soft caps, not {', '.join(limits)}"),
        (
            not set(ropes) <= set(ROPE_TYPES),
            f"is made for the rope types {', '.join(ROPE_TYPES)}, not {', '.join(ropes)}",
        ),
        (head_size % 8 != 0 or head_size > MOST_HEAD_SIZE, f"is made for heads of 8, 16, .. 256, not {head_size}"),
    ]
    for holds, reason in reasons:
        if holds:
            raise PathUnavailable(reason)


def _activation(config: PreTrainedConfig) -> str | None:
    """Return the name of the MLP's activation. Gemma 3 has a word of its own for it."""
    return declared(config, "hidden_activation") or getattr(config, "hidden_act", None)


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of every rotary table that a layer takes."""
    rope = config.rope_parameters
    return [rope] if "rope_type" in rope else [rope[kind] for kind in sorted(set(config.layer_types))]


def _limits(config: PreTrainedConfig) -> list[str]:
    """Return the options, set here, by which some classes compute other attention or other logits."""
    return [name for name in ("use_bidirectional_attention", "final_logit_softcapping") if declared(config, name)]


def _is_plain(model: PreTrainedModel) -> bool:
    """Return whether every linear layer is of the head's kind, and everything else in the model's dtype."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear | Int8Linear)]
    rounded = {id(module.weight) for module in linears if isinstance(module, Int8Linear)}
    return len({type(module) for module in linears}) == 1 and all(
        type(weight.data) is Tensor and (weight.dtype == model.dtype or id(weight) in rounded)
        for weight in model.parameters()
    )


def pack_weights(body: Any, lm_head: nn.Module, shape: FusedShape) -> tuple[NativeModel, Tensor | None]:
    """Return the packed model and the embedding [V, H] in the model's dtype, None where the packed head holds the same.

    body: the module that has embed_tokens, layers, norm and rotary_emb. Raises PathUnavailable.
    """
    _check_tables(body, shape)
    try:
        native = _pack(body, lm_head, shape)
    except (BuildError, MemoryError) as error:
        raise PathUnavailable(str(error)) from error
    embedding = body.embed_tokens.weight
    return native, None if lm_head.weight is embedding else embedding.detach().contiguous()


def _check_tables(body: nn.Module, shape: FusedShape) -> None:
    """Raise PathUnavailable where the rotary tables, which have a row for each position, outweigh the weights: how long
    they are may be a number in config.json alone.
    """
    num_kinds = len(set(shape.rotary_kinds)) or 1
    num_table_bytes = num_kinds * shape.context * shape.head_size * torch.float32.itemsize
    num_weight_bytes = sum(weight.nbytes for weight in body.parameters())
    if num_table_bytes > max(MIN_TABLE_BYTES, num_weight_bytes):
        raise PathUnavailable(
            f"would take {num_table_bytes >> 20} MiB of rotary tables for a context of {shape.context} tokens, more "
            "than the weights; set context_limit"
        )


def _pack(body: Any, lm_head: Any, shape: FusedShape) -> NativeModel:
    """Return the packed model. Raises PathUnavailable, BuildError, MemoryError."""
    spec = NativeSpec(
        *(shape.num_layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_size, shape.intermediate),
        *(shape.vocab, shape.head_rows, shape.is_paired),
        *(KINDS[shape.dtype], Kind.INT8 if shape.is_int8 else KINDS[shape.dtype]),
        *(torch.get_num_threads(), shape.activation),
        *(shape.epsilon, shape.attention_scale, shape.embedding_scale),
    )
    assert ctypes.sizeof(spec) == 16 * 4
    kinds = shape.rotary_kinds or (None,) * shape.num_layers
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    native = NativeModel(spec, shape.windows, [numbers[kind] for kind in kinds])
    for index, layer in enumerate(body.layers):
        _pack_layer(native, index, layer, shape)
    _pack_linear(native, NO_LAYER, Which.HEAD, lm_head)
    native.vector(NO_LAYER, Vector.LAST_NORM, _factors(body.norm))
    for kind in numbers:
        cosine, sine = _rotary_tables(body, shape, kind)
        native.vector(kinds.index(kind), Vector.COSINE, cosine)
        native.vector(kinds.index(kind), Vector.SINE, sine)
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
    norms = {Vector.ATTENTION_NORM: layer.input_layernorm, Vector.MLP_NORM: layer.post_attention_layernorm}
    if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 3: what comes after the attention is of its output
        norms[Vector.ATTENTION_OUT_NORM] = layer.post_attention_layernorm
        norms[Vector.MLP_NORM] = layer.pre_feedforward_layernorm
        norms[Vector.MLP_OUT_NORM] = layer.post_feedforward_layernorm
    if hasattr(getattr(attention, "q_norm", None), "weight"):
        norms |= {Vector.QUERY_NORM: attention.q_norm, Vector.KEY_NORM: attention.k_norm}
    for which, norm in norms.items():
        native.vector(index, which, _factors(norm))


def _factors(norm: nn.Module) -> Tensor:
    """Return what an RMS norm multiplies by, float32: Gemma's keep how much that is above 1."""
    weight = norm.weight.detach().float()
    return 1.0 + weight if type(norm).__name__.startswith("Gemma") else weight


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
def _rotary_tables(body: Any, shape: FusedShape, kind: str | None) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each [context, head_size / 2] float32, from the model's own rotary module."""
    positions, kinds = torch.arange(shape.context)[None], [] if kind is None else [kind]
    cosine, sine = body.rotary_emb(torch.zeros(1, dtype=torch.float32), positions, *kinds)  # [1, context, head_size]
    half = shape.head_size // 2
    if cosine.shape[-1] != shape.head_size or not torch.equal(cosine[..., :half], cosine[..., half:]):
        raise PathUnavailable(f"is made for rotation of the whole head by halves, not of {cosine.shape[-1]} columns")
    return cosine[0, :, :half], sine[0, :, :half]
