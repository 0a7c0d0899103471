"""EAGLE-3 and 3.1 (2503.01840), and P-EAGLE, which has the same network: the network, and the reader of their files.

Files have the layouts of the original repository, SpecForge, speculators and DeepSpec. The layouts differ in names, in
what a layer id means, in which norms there are and in whether the head passes on its normed or unnormed output. A head
that is read in the wrong way drafts fluently and has a lower acceptance rate. Facts that a file leaves open are named
in `HeadFiles.undecided`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_files import HeadFiles, HeadReader
from outrider.engine.heads.llama_head import LlamaFacts, LlamaHead
from outrider.engine.heads.network import MASKED_POSITIONS, BlockShape, CarryHead, HeadFacts
from outrider.engine.heads.projection import Norm, Projection, ProjectionSpec

NAMES = ((r"midlayer\.", "layers.0."),)
"""Pairs of a pattern and a replacement. They turn the tensor names of the original EAGLE repository into the names in
`Eagle3Head`."""
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Alternative keys of config.json for the mask token id: that of the library speculators, then two that vLLM reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(LlamaFacts):
    """Configuration of an EAGLE-3 or P-EAGLE head."""

    norm_before_residual: bool = False
    """Whether the residual of the first layer is the feature after its norm. False = the residual is the feature before
    the norm."""
    qk_norms: bool = False
    """Whether queries and keys are normed per attention head, as in Qwen 3."""
    qkv_bias: bool = False
    has_swapped_norms: bool = False
    """Whether the first layer applies the norm of the embeddings to the features, and the norm of the features to the
    embeddings. False for every head that is read. The wiring test tries True, to find files in which the names of the
    two norms are exchanged."""
    mask_id: int | None = None
    """Token id of the mask tokens that a P-EAGLE head fills; None for an EAGLE-3 head."""


class Eagle3Head(LlamaHead, CarryHead):
    """Network of an EAGLE-3 or P-EAGLE head, without the projection of the target's hidden states. Its tensors have the
    names in files of the library speculators.
    """

    facts: Eagle3Config
    mask_feature: Tensor
    """[d], the feature that a P-EAGLE head uses at its mask tokens, which have no hidden states. Not set in an EAGLE-3
    head."""

    def __init__(self, facts: Eagle3Config) -> None:
        super().__init__(facts)
        self.config.attention_bias = facts.qkv_bias
        layer_class: Any = LlamaDecoderLayer
        if facts.qk_norms:
            layer_class = Qwen3DecoderLayer
        self.layers = nn.ModuleList()
        for index in range(self.config.num_hidden_layers):
            layer = layer_class(self.config, index)
            layer.self_attn.o_proj.bias = None
            self.layers.append(layer)
        first: Any = self.layers[0]  # reads a token's embedding beside the feature
        first.hidden_norm = LlamaRMSNorm(facts.width, eps=self.config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            num_rows = first.self_attn.get_submodule(name).out_features
            first.self_attn.set_submodule(name, nn.Linear(2 * facts.width, num_rows, bias=facts.qkv_bias))
        if facts.mask_id is not None:
            self.register_buffer("mask_feature", torch.empty(facts.width))

    @property
    def block(self) -> BlockShape | None:
        if self.facts.mask_id is None:
            return None
        return BlockShape(MASKED_POSITIONS, self.facts.mask_id, feature=self.mask_feature)

    def misreadings(self) -> Sequence[tuple[str, HeadFacts]]:
        is_normed = self.facts.norm_before_residual
        residual = f"with the first residual {'un' * is_normed}normed"
        return (
            ("with the norms of embedding and features swapped", replace(self.facts, has_swapped_norms=True)),
            (residual, replace(self.facts, norm_before_residual=not is_normed)),
        )

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        embedded = self.embed_tokens(input_ids)  # [1, T, d]
        return self.run_layers(features.to(embedded.dtype), embedded, self.rotary_emb(embedded, position_ids), cache)

    def run_layers(
        self, features: Tensor, embedded: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None
    ) -> Tensor:
        """Return the last layer's output [B, T, d] for features and token embeddings, each [B, T, d]. `rotary`: cosines
        and sines of the tokens' positions. `cache`: the head's KV cache; None = there are no earlier tokens.
        """
        first: Any = self.layers[0]
        token_norm, feature_norm = self.joining_norms()
        normed = feature_norm(features)
        residual = normed if self.facts.norm_before_residual else features
        attended, _ = first.self_attn(torch.cat([token_norm(embedded), normed], dim=-1), rotary, None, cache)
        hidden = residual + attended
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for layer in self.layers[1:]:
            hidden = layer(hidden, past_key_values=cache, position_embeddings=rotary)
        return hidden

    def joining_norms(self) -> tuple[nn.Module, nn.Module]:
        """Return the norms of embeddings and of features, whose outputs the first layer's attention reads."""
        first: Any = self.layers[0]
        if self.facts.has_swapped_norms:
            return first.hidden_norm, first.input_layernorm
        return first.input_layernorm, first.hidden_norm


def read_eagle3(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read the files of an EAGLE-3 head for the target.

    Raises `ConfigError` naming what is missing, unknown or does not fit.
    """
    reader = HeadReader(files, target, NAMES)
    facts, projection, undecided = _open(reader)
    return reader.complete(facts, Eagle3Head, projection, undecided)


def read_peagle(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read the files of a P-EAGLE head for the target: EAGLE-3's tensors, and `mask_hidden`, learnt hidden states for
    mask tokens, for which the target has computed none.

    `mask_hidden` is projected once, here, into `mask_feature`. Raises `ConfigError` naming what is missing, unknown or
    does not fit.
    """
    reader = HeadReader(files, target, NAMES)
    hidden = reader.tensors.pop("mask_hidden", None)
    if hidden is None:
        raise files.refusal("has no mask_hidden, which a P-EAGLE head needs; get the file again")
    reader.tensors["mask_hidden"] = hidden.flatten()  # files may have leading dimensions of one
    mask_id = reader.number(*MASK_KEYS, min_value=0, max_value=target.vocab_size - 1)
    facts, projection, undecided = _open(reader)
    num_taps = len(facts.taps)
    hidden = reader.pop("mask_hidden", num_taps * target.width)
    reader.tensors["mask_feature"] = projection.exact(hidden.view(1, num_taps, target.width))[0]  # [d]
    undecided = tuple(name for name in undecided if name != "is_carry_normed")  # nothing of it is carried
    return reader.complete(replace(facts, mask_id=mask_id), Eagle3Head, projection, undecided)


def _open(reader: HeadReader) -> tuple[Eagle3Config, Projection, tuple[str, ...]]:
    """Return the facts, the projection and the names of open facts; the projection's tensors leave the reader.

    speculators' norm_output says whether carries are normed. SpecForge's says whether the lm_head reads the normed
    output; its training carries the unnormed one, even where its exports for 3.1 have true.
    """
    config, is_wrapped = reader.config, reader.files.is_wrapped
    norm_output = config.get("norm_output")
    facts = Eagle3Config(
        **reader.llama_facts(reader.layers(), _taps(reader)),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        is_carry_normed=is_wrapped and bool(norm_output),
        is_lm_head_normed=is_wrapped or norm_output is not False,
        qk_norms="layers.0.self_attn.q_norm.weight" in reader.tensors,
        qkv_bias="layers.0.self_attn.q_proj.bias" in reader.tensors,
    )
    projection = _read_projection(reader, facts)
    undecided: tuple[str, ...] = ()
    if is_wrapped and "norm_before_residual" not in config:
        undecided = ("norm_before_residual",)
    elif not is_wrapped and norm_output is True and projection.spec.norm == "each":
        undecided = ("is_carry_normed",)
    return facts, projection, undecided


def _taps(reader: HeadReader) -> tuple[int, ...]:
    """Return the hidden states that the head reads: id k means h[k] at the top level of config.json.

    In SpecForge's nested key and in DeepSpec's, which name a layer by its output, id k means h[k + 1].
    """
    config, nested, num_layers = reader.config, reader.files.part("eagle_config"), reader.target.num_layers
    if nested.get("use_aux_hidden_state") is False:
        raise reader.refusal("reads no taps (use_aux_hidden_state is false), and such heads are not served")
    key = "eagle_aux_hidden_state_layer_ids"
    keys = {
        key: (config.get(key), 0),
        f"eagle_config.{key}": (nested.get(key), 1),
        "target_layer_ids": (config.get("target_layer_ids"), 1),
    }
    return reader.taps(keys, (2, num_layers // 2, num_layers - 3))


def _read_projection(reader: HeadReader, facts: LlamaFacts) -> Projection:
    """Remove the projection's tensors from the reader. Its norm must agree with config.json."""
    tensors = reader.tensors
    width = facts.target_width
    num_taps = len(facts.taps)
    for key, name in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        configured = reader.config.get(key)
        has_norm = name in tensors
        if configured is not None and bool(configured) != has_norm:
            there = "there" if has_norm else "missing"
            raise reader.refusal(
                f"is {configured} and {name} {there}; get the file again or correct config.json", of=key
            )
    fc = tensors.pop("fc.weight")
    kind: Norm = "none"
    own = {"fc": fc}
    if "fc_norm.0.weight" in tensors:  # any second norm is refused as an unknown tensor
        norms = [reader.pop(f"fc_norm.{index}.weight", width) for index in range(num_taps)]
        kind = "each"
        own["norm"] = torch.stack(norms).to(fc.dtype)
    elif "input_norm.weight" in tensors:
        kind = "all"
        own["norm"] = reader.pop("input_norm.weight", width * num_taps).to(fc.dtype)
    return Projection(ProjectionSpec(facts.taps, facts.width, kind, facts.layers.rms_norm_eps), own)
