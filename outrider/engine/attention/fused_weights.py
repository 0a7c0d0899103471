"""Read a transformers model's sizes, weights and rotary tables, and pack them for C++. Called by `fused` and
`heads`.
"""

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
from outrider.engine.native.library import (
    NO_LAYER,
    Activation,
    MatrixName,
    NativeModel,
    NativeSpec,
    NumberKind,
    RowPart,
    VectorName,
)
from outrider.engine.quantization.quantize import Int8Linear

CLASSES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma3ForCausalLM",
)
"""Names of the transformers classes that the fused path runs. Names are compared, since a subclass may compute
something else."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rope that the fused path runs: those whose tables of cosines and sines do not depend on the length of a
sequence."""
ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU}
"""Value in the C++ enumeration of each activation function of the MLP, by the function's name in transformers."""
KINDS = {torch.float32: NumberKind.FLOAT32, torch.bfloat16: NumberKind.BFLOAT16}
"""For each dtype of weights, its value in the C++ enumeration of number formats."""
MAX_HEAD_SIZE = 256
"""Maximum number of columns of an attention head for which the kernels are compiled."""
MIN_TABLE_BYTES = 64 << 20
"""Size in bytes of a model's tables of rotary cosines and sines up to which the fused path always runs it: their size
for 131,072 tokens and attention heads of 128 columns. A model with larger tables is run if its weights are as large."""


@dataclass(frozen=True, slots=True)
class FusedShape:
    """Sizes and options of a model for the fused path."""

    num_layers: int
    """Number of decoder layers."""
    hidden: int
    """Width of the hidden states."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key-value heads."""
    head_size: int
    """Number of columns of an attention head."""
    intermediate: int
    """Width of the MLP."""
    vocab: int
    """Number of token ids that may be fed."""
    context: int
    """Context limit in tokens, the number of rows of the rotary tables."""
    epsilon: float
    """Epsilon of the RMS norms."""
    attention_scale: float
    """Factor by which products of queries and keys are multiplied before the softmax."""
    dtype: torch.dtype
    """Dtype of the weights and of the KV cache."""
    windows: tuple[int, ...]
    """For each layer, the maximum number of keys that a query attends to, its own included; 0 = no maximum."""
    is_int8: bool
    """Whether the weights of the linear layers, including the lm_head, are int8 (`Int8Linear`)."""
    lm_head_rows: int
    """Number of rows of the lm_head, and so of logits at a position."""
    activation: Activation = Activation.SILU
    """Activation function of the MLP."""
    embedding_scale: float = 1.0
    """Factor by which the embeddings of tokens are multiplied."""
    rotary_kinds: tuple[str | None, ...] = ()
    """For each layer, the name of the layer type whose rotary tables it uses. Empty if all layers share the same
    tables."""
    is_paired: bool = False
    """Whether layer 0 reads a feature together with each token's embedding, as in an EAGLE-3 head."""

    @classmethod
    def of(cls, model: PreTrainedModel, body: Any, facts: ModelFacts) -> FusedShape:
        """Return the sizes and options of a model. body: the submodule that has `layers` and `embed_tokens`.

        Raises PathUnavailable for a model that this path does not run.
        """
        config = model.config
        attention = body.layers[0].self_attn
        _check(model, config, attention.head_dim)
        embedding_scale = 1.0
        if hasattr(body.embed_tokens, "embed_scale"):  # rounded as transformers does before it multiplies
            embedding_scale = float(body.embed_tokens.embed_scale.to(model.dtype))
        rotary_kinds: tuple[str | None, ...] = ()
        if "rope_type" not in config.rope_parameters:
            rotary_kinds = tuple(config.layer_types)
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
            lm_head_rows=facts.vocab_size,
            activation=ACTIVATIONS[_activation(config)],
            embedding_scale=embedding_scale,
            rotary_kinds=rotary_kinds,
        )


def _check(model: PreTrainedModel, config: PreTrainedConfig, head_size: int) -> None:
    activation = _activation(config)
    options = _unsupported_options(config)
    rope_types = _rope_types(config)
    reasons = [
        (model.device.type != "cpu", f"is made for cpu, not {model.device.type}"),
        (model.dtype not in KINDS, f"is made for float32 and bfloat16, not {model.dtype}"),
        (not _has_plain_weights(model), "is made for whole weights of one dtype, or int8"),
        (activation not in ACTIVATIONS, f"is made for {' and '.join(ACTIVATIONS)}, not {activation}"),
        (bool(options), f"is made for causal attention without soft caps, not {', '.join(options)}"),
        (
            not set(rope_types) <= set(ROPE_TYPES),
            f"is made for the rope types {', '.join(ROPE_TYPES)}, not {', '.join(rope_types)}",
        ),
        (head_size % 8 != 0 or head_size > MAX_HEAD_SIZE, f"is made for heads of 8, 16, .. 256, not {head_size}"),
    ]
    for holds, reason in reasons:
        if holds:
            raise PathUnavailable(reason)


def _activation(config: PreTrainedConfig) -> str | None:
    # Gemma 3 has a name of its own for the option.
    return declared(config, "hidden_activation") or getattr(config, "hidden_act", None)


def _rope_types(config: PreTrainedConfig) -> list[str]:
    # One for all layers, or one for each type of layer.
    rope = config.rope_parameters
    if "rope_type" in rope:
        return [rope["rope_type"]]
    return [rope[kind]["rope_type"] for kind in sorted(set(config.layer_types))]


def _unsupported_options(config: PreTrainedConfig) -> list[str]:
    # Options that are set, and make some classes compute other attention or other logits.
    options: list[str] = []
    for name in ("use_bidirectional_attention", "final_logit_softcapping"):
        if declared(config, name):
            options.append(name)
    return options


def _has_plain_weights(model: PreTrainedModel) -> bool:
    # All linear layers are of one kind, and all weights but the integers of Int8Linear of the model's dtype.
    linear_types = set[type[nn.Module]]()
    int8_weights = set[int]()
    for module in model.modules():
        if isinstance(module, nn.Linear | Int8Linear):
            linear_types.add(type(module))
        if isinstance(module, Int8Linear):
            int8_weights.add(id(module.weight))
    if len(linear_types) != 1:
        return False
    for weight in model.parameters():
        if type(weight.data) is not Tensor:
            return False
        if weight.dtype != model.dtype and id(weight) not in int8_weights:
            return False
    return True


def pack_weights(body: Any, lm_head: nn.Module, shape: FusedShape) -> tuple[NativeModel, Tensor | None]:
    """Pack a model's weights. Return the packed model, and the embedding [V, d] in the model's dtype.

    The embedding is None if it is the same tensor as the lm_head, whose packed form then serves for both. body: the
    submodule that has embed_tokens, layers, norm and rotary_emb. Raises PathUnavailable if the weights cannot be
    packed.
    """
    _check_tables(body, shape)
    try:
        native = _pack(body, lm_head, shape)
    except (BuildError, MemoryError) as error:
        raise PathUnavailable(str(error)) from error
    embedding = body.embed_tokens.weight
    if lm_head.weight is embedding:
        return native, None
    return native, embedding.detach().contiguous()


def _check_tables(body: nn.Module, shape: FusedShape) -> None:
    # A rotary table has a row for each position: by a number in config.json alone it could outweigh the weights.
    num_kinds = len(set(shape.rotary_kinds)) or 1
    num_table_bytes = num_kinds * shape.context * shape.head_size * torch.float32.itemsize
    num_weight_bytes = sum(weight.nbytes for weight in body.parameters())
    if num_table_bytes > max(MIN_TABLE_BYTES, num_weight_bytes):
        raise PathUnavailable(
            f"would take {num_table_bytes >> 20} MiB of rotary tables for a context of {shape.context} tokens, more "
            "than the weights; set context_limit"
        )


def _pack(body: Any, lm_head: Any, shape: FusedShape) -> NativeModel:
    weights = KINDS[shape.dtype]
    if shape.is_int8:
        weights = NumberKind.INT8
    spec = NativeSpec(
        num_layers=shape.num_layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        intermediate=shape.intermediate,
        vocab=shape.vocab,
        lm_head_rows=shape.lm_head_rows,
        paired=shape.is_paired,
        dtype=KINDS[shape.dtype],
        weights=weights,
        num_threads=torch.get_num_threads(),
        activation=shape.activation,
        epsilon=shape.epsilon,
        attention_scale=shape.attention_scale,
        embedding_scale=shape.embedding_scale,
    )
    assert ctypes.sizeof(spec) == 16 * 4
    # kinds ("full", "sliding", "full"): tables {"full": 0, "sliding": 1}, layer_tables [0, 1, 0]
    kinds = shape.rotary_kinds or (None,) * shape.num_layers
    tables: dict[str | None, int] = {}
    layer_tables: list[int] = []
    for kind in kinds:
        tables.setdefault(kind, len(tables))
        layer_tables.append(tables[kind])
    native = NativeModel(spec, shape.windows, layer_tables)
    for index, layer in enumerate(body.layers):
        _pack_layer(native, index, layer, shape)
    _pack_linear(native, NO_LAYER, MatrixName.LM_HEAD, lm_head)
    native.set_vector(NO_LAYER, VectorName.LAST_NORM, _factors(body.norm))
    for kind in tables:
        cosine, sine = _rotary_tables(body, shape, kind)
        native.set_vector(kinds.index(kind), VectorName.COSINE, cosine)
        native.set_vector(kinds.index(kind), VectorName.SINE, sine)
    return native


def _pack_layer(native: NativeModel, index: int, layer: Any, shape: FusedShape) -> None:
    attention = layer.self_attn
    mlp = layer.mlp
    query_width = shape.heads * shape.head_size
    key_width = shape.kv_heads * shape.head_size
    _pack_linear(native, index, MatrixName.QKV, attention.q_proj)
    _pack_linear(native, index, MatrixName.QKV, attention.k_proj, query_width)
    _pack_linear(native, index, MatrixName.QKV, attention.v_proj, query_width + key_width)
    _pack_linear(native, index, MatrixName.OUT, attention.o_proj)
    _pack_linear(native, index, MatrixName.GATE_UP, mlp.gate_proj, part=RowPart.GATE)
    _pack_linear(native, index, MatrixName.GATE_UP, mlp.up_proj, part=RowPart.UP)
    _pack_linear(native, index, MatrixName.DOWN, mlp.down_proj)
    norms = {VectorName.ATTENTION_NORM: layer.input_layernorm, VectorName.MLP_NORM: layer.post_attention_layernorm}
    if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma 3: post_attention_layernorm is of the attention's output
        norms[VectorName.ATTENTION_OUT_NORM] = layer.post_attention_layernorm
        norms[VectorName.MLP_NORM] = layer.pre_feedforward_layernorm
        norms[VectorName.MLP_OUT_NORM] = layer.post_feedforward_layernorm
    if hasattr(getattr(attention, "q_norm", None), "weight"):
        norms |= {VectorName.QUERY_NORM: attention.q_norm, VectorName.KEY_NORM: attention.k_norm}
    for which, norm in norms.items():
        native.set_vector(index, which, _factors(norm))


def _factors(norm: nn.Module) -> Tensor:
    # What an RMS norm multiplies by, float32. Gemma's weights are the difference from 1.
    weight = norm.weight.detach().float()
    if type(norm).__name__.startswith("Gemma"):
        return 1.0 + weight
    return weight


def _pack_linear(
    native: NativeModel,
    layer: int,
    which: MatrixName,
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
    """Return cosine and sine, each [context, head_size / 2] float32, from the model's own rotary module.

    kind: type of the layers that the tables are for; None where all layers share them.
    """
    positions = torch.arange(shape.context)[None]  # [1, context] int64
    arguments: list[Any] = [torch.zeros(1, dtype=torch.float32), positions]  # the first for its dtype and device
    if kind is not None:
        arguments.append(kind)
    cosine, sine = body.rotary_emb(*arguments)  # [1, context, head_size] each
    half = shape.head_size // 2
    if cosine.shape[-1] != shape.head_size or not torch.equal(cosine[..., :half], cosine[..., half:]):
        raise PathUnavailable(f"is made for rotation of the whole head by halves, not of {cosine.shape[-1]} columns")
    return cosine[0, :, :half], sine[0, :, :half]
