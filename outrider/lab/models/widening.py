"""Widen a Llama checkpoint: a larger model with the same logits. Called by benchmarks.

A small pair that was really trained has a realistic acceptance rate and an unrealistic cost: its target costs hardly
more than its draft. Widening keeps the acceptance and raises the cost, so that speed can be measured anywhere:

* The residual stream is padded with zeros, and nothing ever writes to the padding.
* Added heads, neurons and layers keep random input weights, so that they cost what dense ones cost, and have output
  weights of zero, so that they change nothing.
* RMSNorm divides by the root mean square over D entries instead of d, of which D - d are zero. Its weights are scaled
  by sqrt(d/D) and its epsilon by d/D, which gives back the same numbers.

Every table made with a widened target must state that it is widened.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from outrider.engine.files.model_files import check_folder

CHECKED_TOKENS = (2, 64)
"""(batch size, length in tokens) of the random texts on which the widened model is compared with the original."""


class WideningError(ValueError):
    """A model cannot be widened, for example because it is no Llama, has biases, or a requested size is not possible.
    The message says which.
    """


@dataclass(frozen=True, slots=True)
class WidenedSizes:
    """Sizes of the larger model that `widen` returns. The larger model computes the same logits as the original one."""

    hidden: int
    """Width of the residual stream; a multiple of `heads`."""
    intermediate: int
    """Number of neurons of each MLP, as `intermediate_size` in a Llama's configuration."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key and value heads; it must divide `heads`."""
    extra_layers: int = 0
    """Number of layers that are added after the model's own layers. They do not change the logits."""


def widen(model: LlamaForCausalLM, sizes: WidenedSizes) -> LlamaForCausalLM:
    """Return a larger model with the same dtype and device, whose logits equal those of `model` up to rounding.

    Raises WideningError if `model` is not a Llama without biases, or if a size is smaller than the model's own.
    """
    check(model, sizes)
    wide = LlamaForCausalLM(wide_config(model.config, sizes)).to(device=model.device, dtype=model.dtype)
    wide.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # `to` has rounded the frequencies to its dtype
    width = model.config.hidden_size
    with torch.no_grad():
        _zero_but(wide.model.embed_tokens.weight, model.model.embed_tokens.weight)
        if not model.config.tie_word_embeddings:
            _zero_but(wide.lm_head.weight, model.lm_head.weight)
        _widen_norm(wide.model.norm, model.model.norm)
        for index, layer in enumerate(wide.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            if index < model.config.num_hidden_layers:
                _widen_layer(layer, model.model.layers[index], _query_rows(model.config, sizes), width)
    return wide.eval()


def check(model: torch.nn.Module, sizes: WidenedSizes) -> None:
    """Raise WideningError unless `model` can be widened to these sizes; the message names the first obstacle."""
    if not isinstance(model, LlamaForCausalLM):
        raise WideningError(f"the model is a {type(model).__name__}; only LlamaForCausalLM can be widened")
    config = model.config
    if config.attention_bias or config.mlp_bias:
        raise WideningError("the model has biases in its attention or MLP; only Llamas without can be widened")
    for name, old in (
        ("hidden", config.hidden_size),
        ("intermediate", config.intermediate_size),
        ("heads", config.num_attention_heads),
        ("kv_heads", config.num_key_value_heads),
        ("extra_layers", 0),
    ):
        new = getattr(sizes, name)
        if new < old:
            raise WideningError(f"{name} is {new}, must be at least the model's own {old}")
    if sizes.heads % sizes.kv_heads:
        raise WideningError(f"heads is {sizes.heads}, must be a multiple of kv_heads, {sizes.kv_heads}")
    if sizes.hidden % sizes.heads:  # transformers refuses to save such a config, though the head size is explicit
        raise WideningError(f"hidden is {sizes.hidden}, must be a multiple of heads, {sizes.heads}")
    group = sizes.heads // sizes.kv_heads
    old_group = config.num_attention_heads // config.num_key_value_heads
    if group < old_group:
        raise WideningError(f"heads / kv_heads is {group}, must be at least the model's own {old_group}: add heads")


def wide_config(config: LlamaConfig, sizes: WidenedSizes) -> LlamaConfig:
    """Return a copy of a model's configuration with the new sizes. The width of an attention head and the rotary
    embedding do not change.
    """
    wide = copy.deepcopy(config)
    wide.head_dim = head_dim(config)
    wide.hidden_size = sizes.hidden
    wide.intermediate_size = sizes.intermediate
    wide.num_attention_heads = sizes.heads
    wide.num_key_value_heads = sizes.kv_heads
    wide.num_hidden_layers = config.num_hidden_layers + sizes.extra_layers
    wide.rms_norm_eps = config.rms_norm_eps * config.hidden_size / sizes.hidden
    return wide


def head_dim(config: LlamaConfig) -> int:
    """Return the width of an attention head in a model with this configuration."""
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


def _query_rows(config: LlamaConfig, sizes: WidenedSizes) -> torch.Tensor:
    # [old heads * head_dim] int64: the row in the new projection of each row of the old query heads
    # 4 query heads of 2 KV heads widened to 8 of 2: old heads 0, 1, 2, 3 are the new heads 0, 1, 4, 5
    old_group = config.num_attention_heads // config.num_key_value_heads
    group = sizes.heads // sizes.kv_heads
    old = torch.arange(config.num_attention_heads)
    new = old // old_group * group + old % old_group  # [old heads]
    size = head_dim(config)
    return (new[:, None] * size + torch.arange(size)).flatten()


def _widen_layer(layer: LlamaDecoderLayer, old: LlamaDecoderLayer, query_rows: torch.Tensor, width: int) -> None:
    # the caller has set o_proj and down_proj to zero
    new_attention = layer.self_attn
    attention = old.self_attn
    new_attention.q_proj.weight[query_rows, :width] = attention.q_proj.weight
    _into_corner(new_attention.k_proj.weight, attention.k_proj.weight)
    _into_corner(new_attention.v_proj.weight, attention.v_proj.weight)
    new_attention.o_proj.weight[:width, query_rows] = attention.o_proj.weight
    _into_corner(layer.mlp.gate_proj.weight, old.mlp.gate_proj.weight)
    _into_corner(layer.mlp.up_proj.weight, old.mlp.up_proj.weight)
    _into_corner(layer.mlp.down_proj.weight, old.mlp.down_proj.weight)
    _widen_norm(layer.input_layernorm, old.input_layernorm)
    _widen_norm(layer.post_attention_layernorm, old.post_attention_layernorm)


def _into_corner(new: torch.Tensor, old: torch.Tensor) -> None:
    new[: old.shape[0], : old.shape[1]] = old


def _zero_but(new: torch.Tensor, old: torch.Tensor) -> None:
    new.zero_()  # [V, D] from [V, d]
    _into_corner(new, old)


def _widen_norm(new: LlamaRMSNorm, old: LlamaRMSNorm) -> None:
    width = old.weight.shape[0]
    new.weight.zero_()
    new.weight[:width] = old.weight * (width / new.weight.shape[0]) ** 0.5


@torch.inference_mode()
def largest_difference(model: LlamaForCausalLM, other: LlamaForCausalLM) -> float:
    """Return the largest absolute difference between the logits of two models on the same random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, CHECKED_TOKENS, generator=generator).to(model.device)  # [2, 64]
    return (model(ids).logits - other(ids).logits).abs().max().item()


def widen_folder(source: Path, destination: Path, sizes: WidenedSizes, dtype: torch.dtype = torch.float32) -> str:
    """Widen the checkpoint in the folder `source` and save it in `destination`, with its tokenizer and chat template.
    Return a line of text that describes the result.

    dtype: dtype of the saved weights. Before they are saved, the logits of both models are compared in float32. Raises
    WideningError if `source` holds no Llama, or if the logits differ.
    """
    if not (source / "config.json").is_file():
        raise WideningError(f"{source} holds no model: config.json is missing")
    check_folder(source)
    config = AutoConfig.from_pretrained(source)
    if config.model_type != "llama":
        raise WideningError(f"{source} holds a model of type {config.model_type}; only llama can be widened")
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32, use_safetensors=True).eval()
    wide = widen(model, sizes)
    difference = largest_difference(model, wide)
    if not difference < 1e-3:
        raise WideningError(f"the widened model's logits differ by {difference:.1e}: {source} cannot be widened")
    wide.to(dtype).save_pretrained(destination)
    AutoTokenizer.from_pretrained(source).save_pretrained(destination)
    return f"{_millions(model):.1f}M -> {_millions(wide):.1f}M parameters, largest logit difference {difference:.1e}"


def _millions(model: LlamaForCausalLM) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6
