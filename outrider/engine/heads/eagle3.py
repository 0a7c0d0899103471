"""EAGLE-3 and 3.1 (2503.01840), and P-EAGLE, whose network is the same: the network, and the reader of their files.

The layouts that people hold are the original repository's, SpecForge's, speculators' and DeepSpec's. They differ in
names, in what a layer id means, in which norms there are and in what is carried; a wrong reading drafts fluently and is
accepted less. What a file leaves open is named in `HeadFiles.undecided`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_files import (
    HeadFiles,
    agreed_taps,
    complete,
    layer_config,
    layer_ids,
    llama_facts,
    masked_id,
    read_tensors,
    take_norm,
)
from outrider.engine.heads.llama_head import HeadAttention, HeadNorm, LlamaFacts, LlamaHead
from outrider.engine.heads.network import MASKED_POSITIONS, BlockShape, CarryHead, Misreading, swapped
from outrider.engine.heads.opening import Norm, OpeningMap, OpeningSpec
from outrider.wire.errors import ConfigError

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""speculators' name of the masked id, and vLLM's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(LlamaFacts):
    """Facts of an EAGLE-3 head. Its first layer's residual and what it carries are in no tensor."""

    norm: Norm = "none"
    """Norm of the opening map."""
    norm_before_residual: bool = False
    """Whether the first residual is the feature after its norm."""
    qk_norms: bool = False
    """Whether queries and keys are normed, head by head (Qwen 3)."""
    qkv_bias: bool = False
    mask_id: int | None = None
    """The id that stands at positions that a P-EAGLE head fills; None for EAGLE-3."""


class Eagle3Head(LlamaHead, CarryHead):
    """The network behind the opening map. Its tensors have speculators' names."""

    facts: Eagle3Config

    def __init__(self, facts: Eagle3Config) -> None:
        super().__init__(facts)
        self.layers = nn.ModuleList(_Layer(self.config, facts, index) for index in range(facts.num_layers))
        if facts.mask_id is not None:
            self.register_buffer("mask_feature", torch.empty(facts.width))

    @property
    def block(self) -> BlockShape | None:
        if self.facts.mask_id is None:
            return None
        return BlockShape(MASKED_POSITIONS, self.facts.mask_id, feature=self.mask_feature)

    def decide(self, facts: Eagle3Config) -> None:
        super().decide(facts)
        first: Any = self.layers[0]
        first.norm_before_residual = facts.norm_before_residual

    def misreadings(self) -> Sequence[Misreading]:
        is_normed = self.facts.norm_before_residual
        residual = self.decided(replace(self.facts, norm_before_residual=not is_normed))
        return (
            (
                "with the norms of embedding and features swapped",
                swapped(self.layers[0], "input_layernorm", "hidden_norm"),
            ),
            (f"with the first residual {'un' * is_normed}normed", residual),
        )

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        embedded = self.embed_tokens(input_ids)  # [1, T, d]
        hidden = features.to(embedded.dtype)
        rotary = self.rotary_emb(embedded, position_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, embedded if index == 0 else None, rotary, cache)
        return hidden


class _Layer(nn.Module):
    """A decoder layer; the first reads a token's embedding beside the feature."""

    def __init__(self, config: LlamaConfig, facts: Eagle3Config, index: int) -> None:
        super().__init__()
        self.norm_before_residual = facts.norm_before_residual
        input_width = facts.width
        if index == 0:
            self.hidden_norm = HeadNorm(facts.width, eps=facts.epsilon)
            input_width = 2 * facts.width
        self.input_layernorm = HeadNorm(facts.width, eps=facts.epsilon)
        self.self_attn = HeadAttention(config, index, input_width, has_norms=facts.qk_norms, has_bias=facts.qkv_bias)
        self.post_attention_layernorm = HeadNorm(facts.width, eps=facts.epsilon)
        self.mlp = LlamaMLP(config)

    def forward(
        self, hidden: Tensor, embedded: Tensor | None, rotary: tuple[Tensor, Tensor], cache: Cache | None
    ) -> Tensor:
        """Return [1, T, d] of hidden [1, T, d] and, in the first layer, embedded [1, T, d]."""
        if embedded is None:
            residual, inner = hidden, self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inner = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [1, T, 2d]
        hidden = residual + self.self_attn(inner, inner, rotary, cache)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def read_eagle3(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read an EAGLE-3 head for that target.

    Raises ConfigError for whatever is missing, unknown or does not fit, by its name.
    """
    tensors = read_tensors(files, _own_name)
    facts, undecided = _facts(files, tensors, target)
    opening = _take_opening(files, tensors, facts)
    complete(files, tensors, facts, target, Eagle3Head, "an EAGLE-3 head")
    return HeadFiles(facts, tensors, opening, undecided)


def read_peagle(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """As `read_eagle3`: EAGLE-3's tensors, and a stand-in for the hidden states of positions that are not there yet. It
    goes through the opening map here, once.
    """
    tensors = read_tensors(files, _own_name)
    hidden = tensors.pop("mask_hidden", None)
    if hidden is None:
        raise ConfigError(f"{files.model} has no mask_hidden, which a P-EAGLE head needs; get the file again")
    mask_id = masked_id(files, MASK_KEYS, target.vocab_size)
    facts, undecided = _facts(files, tensors, target)
    opening = _take_opening(files, tensors, facts)
    num_taps = len(facts.taps)
    if hidden.numel() != num_taps * target.width:
        raise ConfigError(
            f"mask_hidden of {files.model} is {list(hidden.shape)}, and {num_taps} hidden states of {target.model} are "
            f"{num_taps} x {target.width} = {num_taps * target.width}; give the target that it was made for",
            param="target_model",
        )
    tensors["mask_feature"] = opening.exact(hidden.view(1, num_taps, target.width))[0]  # [d]
    facts = replace(facts, mask_id=mask_id)
    complete(files, tensors, facts, target, Eagle3Head, "a P-EAGLE head")
    undecided = tuple(name for name in undecided if name != "carries_normed")  # nothing of it is carried
    return HeadFiles(facts, tensors, opening, undecided)


def _own_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _facts(
    files: Checkpoint, tensors: Mapping[str, Tensor], target: TargetFiles
) -> tuple[Eagle3Config, tuple[str, ...]]:
    """Return facts, and which of them the files leave open.

    speculators' norm_output says whether carries are normed. SpecForge's says whether the lm_head reads the normed
    output, and its training carries what is not normed, also where its exports for 3.1 say true.
    """
    config, layers = files.config, layer_config(files)
    taps = _taps(files, target.num_layers)
    norm = _norm_kind(files, tensors, len(taps))
    norm_output = config.get("norm_output")
    undecided = list[str]()
    if files.is_wrapped:
        carries_normed, reads_normed = bool(norm_output), True
        if "norm_before_residual" not in config:
            undecided.append("norm_before_residual")
    else:
        carries_normed, reads_normed = False, norm_output is not False
        if norm_output is True and norm == "each":
            undecided.append("carries_normed")
    facts = Eagle3Config(
        **llama_facts(files, tensors, layers, target, taps),
        norm=norm,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        carries_normed=carries_normed,
        reads_normed=reads_normed,
        qk_norms="layers.0.self_attn.q_norm.weight" in tensors,
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
    )
    return facts, tuple(undecided)


def _taps(files: Checkpoint, num_layers: int) -> tuple[int, ...]:
    """Return the hidden states that the head reads: id k means h[k] at the top level, and h[k + 1] in the nested key of
    SpecForge and in DeepSpec's, which name a layer by its output.
    """
    nested = files.part("eagle_config")
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{files.model} reads no taps (use_aux_hidden_state is false), and such heads are not served")
    key = "eagle_aux_hidden_state_layer_ids"
    said = {
        key: layer_ids(files, files.config.get(key), 0),
        f"eagle_config.{key}": layer_ids(files, nested.get(key), 1),
        "target_layer_ids": layer_ids(files, files.config.get("target_layer_ids"), 1),
    }
    return agreed_taps(files, said, (2, num_layers // 2, num_layers - 3), num_layers)


def _norm_kind(files: Checkpoint, tensors: Mapping[str, Tensor], num_taps: int) -> Norm:
    """Return the norm before the opening map, by its tensors; the configuration must not say otherwise."""
    has_each = any(name.startswith("fc_norm.") for name in tensors)
    has_all = "input_norm.weight" in tensors
    if has_each and has_all:
        raise ConfigError(f"{files.model} has fc_norm and input_norm, which exclude each other", param="model")
    for key, has, names in (
        ("fc_norm", has_each, f"fc_norm.0.weight to fc_norm.{num_taps - 1}.weight"),
        ("norm_before_fc", has_all, "input_norm.weight"),
    ):
        says = files.config.get(key)
        if says is not None and bool(says) != has:
            raise ConfigError(
                f"{key} of {files.model} is {says} and {names} {'there' if has else 'missing'}; get the file again or "
                "correct config.json",
                param="model",
            )
    if has_each:
        return "each"
    return "all" if has_all else "none"


def _take_opening(files: Checkpoint, tensors: dict[str, Tensor], facts: Eagle3Config) -> OpeningMap:
    """Take the opening map's tensors out of `tensors`."""
    num_taps, width = len(facts.taps), facts.target_width
    taken = {"fc": tensors.pop("fc.weight")}
    if facts.norm == "each":
        norms = [take_norm(files, tensors, f"fc_norm.{index}.weight", width) for index in range(num_taps)]
        taken["norm"] = torch.stack(norms)
    elif facts.norm == "all":
        taken["norm"] = take_norm(files, tensors, "input_norm.weight", num_taps * width)
    dtype = taken["fc"].dtype
    spec = OpeningSpec(facts.taps, facts.width, facts.norm, facts.epsilon)
    return OpeningMap(spec, {name: tensor.to(dtype) for name, tensor in taken.items()})
