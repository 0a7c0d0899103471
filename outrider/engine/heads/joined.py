"""Heads that join a token's embedding with a feature, project both together and run decoder layers over the result.

They are EAGLE-1 and 2 (2401.15077, 2406.16858), in files of their own, and the MTP heads of DeepSeek-V3 (2412.19437),
GLM and similar models, inside a target's checkpoint or in speculators' own file.

The layers are modules of transformers, of the configuration's class, so latent attention and experts need no code here.
In all layouts the projection's input is [embedding, feature], and the feature is the target's last hidden state after
its final norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from outrider.engine.files.model_files import first_line
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_files import HeadFiles, HeadReader
from outrider.engine.heads.network import CarryHead, HeadFacts
from outrider.engine.heads.projection import Projection
from outrider.wire.errors import ConfigError

EAGLE1_NAMES = ((r"layers\.", "model.layers."), (r"fc\.", "eh_proj."))
DEEPSEEK_NAMES = (
    (r"(enorm|hnorm|eh_proj|embed_tokens)\.", r"\1."),
    (r"shared_head\.norm\.", "norm."),
    (r"shared_head\.head\.", "lm_head."),
    ("", "layers.0."),
)
"""Patterns and replacements that turn tensor names of DeepSeek's and GLM's layout into those of `JoinedHead`. They are
applied to what follows `model.layers.{n}.` in a name, where n is the number of the target's layers."""
QWEN_NAMES = (
    (r"pre_fc_norm_embedding\.", "enorm."),
    (r"pre_fc_norm_hidden\.", "hnorm."),
    (r"fc\.", "eh_proj."),
)
"""Patterns and replacements that turn tensor names of Qwen's layout into those of `JoinedHead`. They are applied to
what follows `mtp.` in a name."""
SPECULATORS_NAMES = (
    (r"mtp_layers\.0\.token_layernorm\.", "enorm."),
    (r"mtp_layers\.0\.hidden_layernorm\.", "hnorm."),
    (r"mtp_layers\.0\.input_proj\.", "eh_proj."),
    (r"mtp_layers\.0\.final_layernorm\.", "norm."),
    (r"mtp_layers\.0\.", "layers.0."),
)
"""Patterns and replacements that turn tensor names of the library speculators into those of `JoinedHead`."""
MTP = "the MTP head"
"""Name of an MTP head in error messages."""
AROUND = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "lm_head.weight")
"""Names of an MTP head's tensors that transformers' class for its layer does not have."""
JOINING = (*AROUND, "norm.weight", "embed_tokens.weight")
"""Names of all tensors of an MTP head that are not in its layer."""
_FIRST = re.compile(r"(.*\.)?layers\.(\d+)\.eh_proj\.weight")
_EXPERT = re.compile(r"layers\.0\.mlp\.experts\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedConfig(HeadFacts):
    """Configuration of an EAGLE-1 or MTP head, whatever its files' layout. The lm_head has a row for every token id."""

    layers: PreTrainedConfig
    """Configuration of the decoder layers: their number, class and width. Its vocabulary size is the target's."""
    has_join_norms: bool
    """Whether there are norms of the embedding, the feature and the layers' output: in MTP heads, not in EAGLE-1."""
    join_bias: bool = False
    """Whether the projection of embedding and feature has a bias (some EAGLE-1 heads)."""
    is_exchanged: bool = False
    """Whether the projection reads cat[feature, embedding] instead of cat[embedding, feature]. False for every head
    that is read. The wiring test tries True, to find heads that were trained in that order."""
    has_swapped_norms: bool = False
    """Whether the norm of the embedding is applied to the feature, and the norm of the feature to the embedding. False
    for every head that is read. The wiring test tries True, to find files in which the names of the two norms are
    exchanged."""


class JoinedHead(CarryHead):
    """Network of an EAGLE-1 or MTP head: y = layers(eh_proj(cat[enorm(embedding), hnorm(feature)])), with the logits
    lm_head(norm(y)).

    EAGLE-1 has none of these norms, nor the norm before the first layer's attention.
    """

    facts: JoinedConfig

    def __init__(self, facts: JoinedConfig) -> None:
        config = deepcopy(facts.layers)
        super().__init__(config, facts)
        self.model: Any = MODEL_MAPPING[type(config)](config)
        norm_class = type(self.model.norm)
        self.model.embed_tokens = self.model.norm = nn.Identity()
        self.embed_tokens = nn.Embedding(facts.vocab_size, facts.width)  # enorm cancels its scale, if any
        self.eh_proj = nn.Linear(2 * facts.width, facts.width, bias=facts.join_bias)
        self.lm_head = nn.Linear(facts.width, facts.vocab_size, bias=False)
        if facts.has_join_norms:
            self.enorm = norm_class(facts.width, eps=config.rms_norm_eps)
            self.hnorm = norm_class(facts.width, eps=config.rms_norm_eps)
            self.norm = norm_class(facts.width, eps=config.rms_norm_eps)
        else:
            self.enorm = self.hnorm = self.norm = self.model.layers[0].input_layernorm = nn.Identity()

    def misreadings(self) -> Sequence[tuple[str, HeadFacts]]:
        found = [("with embedding and feature exchanged", replace(self.facts, is_exchanged=True))]
        if self.facts.has_join_norms:
            found.append(
                ("with the norms of embedding and features swapped", replace(self.facts, has_swapped_norms=True))
            )
        return found

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        embedded = self.embed_tokens(input_ids)  # [1, T, d]
        enorm, hnorm = self.enorm, self.hnorm
        if self.facts.has_swapped_norms:
            enorm, hnorm = hnorm, enorm
        parts = [enorm(embedded), hnorm(features.to(embedded.dtype))]
        if self.facts.is_exchanged:
            parts.reverse()
        joined = self.eh_proj(torch.cat(parts, dim=-1))  # [1, T, d]
        output = self.model(
            inputs_embeds=joined, position_ids=position_ids, past_key_values=cache, use_cache=cache is not None
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def num_mtp_layers(files: Checkpoint) -> int:
    """Return the number of MTP layers in a target's checkpoint, according to its config.json; 0 if that states none."""
    text = files.part("text_config") or files.config
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        number = text.get(key)
        if isinstance(number, int) and number > 0:
            return number
    return 0


def has_mtp(names: frozenset[str]) -> bool:
    """Return whether `names`, those of the tensors of a target's checkpoint, include an MTP head in a known layout."""
    return "mtp.fc.weight" in names or any(_FIRST.fullmatch(name) for name in names)


def read_eagle1(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read the files of an EAGLE-1 or EAGLE-2 head for the target. The two have the same files: EAGLE-2 differs in how
    it builds trees at run time.

    Raises `ConfigError` naming what is missing, unknown or does not fit.
    """
    reader = HeadReader(files, target, EAGLE1_NAMES)
    raw = files.part("model") or files.config  # vLLM nests it
    if "model.layers.0.self_attn.q_proj.bias" in reader.tensors and raw.get("model_type", "llama") == "llama":
        raw = {**raw, "model_type": "qwen2"}  # Llama's class has a bias of the output beside those of q, k and v
    layers = reader.layers(raw)
    has_bias = "eh_proj.bias" in reader.tensors
    if files.config.get("bias", has_bias) != has_bias:
        there = "there" if has_bias else "missing"
        raise files.refusal(
            f"is {files.config['bias']}, and fc.bias is {there}; correct its config.json or get the file again",
            of="bias",
        )
    facts = _facts(reader, layers, has_join_norms=False, join_bias=has_bias)
    return reader.complete(facts, JoinedHead, Projection.identity(facts.width))


def read_mtp(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read the files of an MTP head for the target. If there are several MTP layers, only the first is read. It then
    drafts token after token, from its own output.

    Raises `ConfigError` naming what is missing, unknown or does not fit.
    """
    layers = deepcopy(target.config.get_text_config(decoder=True))
    is_carry_normed = True
    undecided: tuple[str, ...] = ()
    if files.is_wrapped:
        reader = HeadReader(files, target, SPECULATORS_NAMES)
        layers = reader.layers()
    elif "mtp.fc.weight" in files.names:
        reader = HeadReader(files, target, QWEN_NAMES, prefix="mtp.")
    else:
        reader = HeadReader(files, target, DEEPSEEK_NAMES, prefix=_prefix(files, target.num_layers))
        is_carry_normed = layers.model_type.startswith("glm")
        undecided = ("is_carry_normed",)
    has_experts = any(name.startswith("layers.0.mlp.experts.") for name in reader.tensors)
    _one_layer(layers, is_sparse=has_experts)
    facts = _facts(reader, layers, has_join_norms=True, is_carry_normed=is_carry_normed)
    reader.fill_from_target(facts)
    _convert_layer(reader, layers)
    return reader.complete(facts, JoinedHead, Projection.identity(facts.width), undecided)


def _facts(reader: HeadReader, layers: PreTrainedConfig, **facts: bool) -> JoinedConfig:
    target, vocab_size = reader.target, reader.target.vocab_size
    layers.vocab_size, layers.pad_token_id = vocab_size, None
    if layers.hidden_size != target.width:
        raise reader.refusal(
            f"is {layers.hidden_size} wide and {target.model} {target.width}; give the target that it was made for",
            param="target_model",
        )
    return JoinedConfig(layers=layers, width=target.width, vocab_size=vocab_size, draft_vocab_size=vocab_size, **facts)


def _prefix(files: Checkpoint, num_layers: int) -> str:
    found = [name for name in sorted(files.names) if _FIRST.fullmatch(name)]
    for name in found:
        if name.endswith(f"layers.{num_layers}.eh_proj.weight"):
            return name.removesuffix("eh_proj.weight")
    raise files.refusal(
        f"is at {', '.join(found) or 'no layer'}, must be behind the target's {num_layers} layers", of=MTP
    )


def _one_layer(layers: PreTrainedConfig, *, is_sparse: bool) -> None:
    # change the target's configuration to that of one layer, the head's
    layers.num_hidden_layers = 1
    types = getattr(layers, "layer_types", None)
    if types is not None:
        layers.layer_types = ["full_attention"]
        if "indexed_attention" in types:
            layers.layer_types = ["indexed_attention"]
    if getattr(layers, "mlp_layer_types", None) is not None:
        layers.mlp_layer_types = ["sparse" if is_sparse else "dense"]
    if hasattr(layers, "first_k_dense_replace"):
        layers.first_k_dense_replace = int(not is_sparse)


def _convert_layer(reader: HeadReader, layers: PreTrainedConfig) -> None:
    """Replace the reader's tensors with those of `JoinedHead`.

    The layer's tensors become those of transformers' class, which concatenates the experts of a checkpoint.
    """
    model_class: Any = MODEL_MAPPING[type(layers)]
    layer_tensors = dict(reader.tensors)
    for name in AROUND:
        layer_tensors.pop(name, None)
    reader.refuse("not all tensors", _missing_experts(layer_tensors), of=MTP)
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = model_class.from_pretrained(
            None,
            config=deepcopy(layers),
            state_dict=layer_tensors,
            dtype=next(iter(layer_tensors.values())).dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # conversions raise what torch does
        whose = f"the MTP layer of {reader.files.model}"
        raise ConfigError(f"cannot read {whose}: {first_line(error)}", param="model") from error
    reader.refuse("tensors that its layer does not have", info["unexpected_keys"], of=MTP)
    reader.refuse("not all tensors", info["missing_keys"], of=MTP)
    mismatched = [name for name, *_ in info["mismatched_keys"]]
    reader.refuse("tensors of another shape than by its config.json", mismatched, of=MTP)
    for name in reader.tensors.keys() - set(JOINING):
        del reader.tensors[name]
    for name, tensor in model.layers.state_dict().items():
        reader.tensors[f"model.layers.{name}"] = tensor


def _missing_experts(names: Iterable[str]) -> list[str]:
    """Return the names of tensors that some experts lack and others have: transformers does not report these."""
    # experts.0.up, experts.0.down, experts.1.up: [experts.1.down]
    parts_of = dict[str, set[str]]()
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            parts_of.setdefault(match[1], set()).add(match[2])
    all_parts = set[str]().union(*parts_of.values())
    missing = list[str]()
    for expert, parts in parts_of.items():
        for part in all_parts - parts:
            missing.append(f"experts.{expert}.{part}")
    return missing
