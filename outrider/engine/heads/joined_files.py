"""Read heads that join a token's embedding and a feature: EAGLE-1 and 2 in files of their own, and MTP heads inside a
target's checkpoint (DeepSeek-V3's and GLM's layout, Qwen's) or in speculators' own file.

All layouts lay the projection's input out as [embedding, feature], and the feature is the target's last hidden state
after its final norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_files import IGNORED, HeadFiles, HeadReader, read_tensors
from outrider.engine.heads.joined import JoinedConfig, JoinedHead
from outrider.engine.heads.opening import OpeningMap
from outrider.engine.loading.model_files import first_line
from outrider.wire.errors import ConfigError

IN_LAYER = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}
"""Names of DeepSeek's and GLM's layout, behind `model.layers.{n}.`, where n is the number of the target's layers."""
QWEN = {
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
    "norm.weight": "norm.weight",
}
"""Names of Qwen's layout, behind `mtp.`; its layer is `mtp.layers.0.`."""
SPECULATORS = {
    "mtp_layers.0.token_layernorm.weight": "enorm.weight",
    "mtp_layers.0.hidden_layernorm.weight": "hnorm.weight",
    "mtp_layers.0.input_proj.weight": "eh_proj.weight",
    "mtp_layers.0.final_layernorm.weight": "norm.weight",
    "embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
}
"""Names of speculators' layout; its layer is the rest of `mtp_layers.0.`."""
MTP = "the MTP head"
JOINING = frozenset(IN_LAYER.values()) | {"eh_proj.bias"}
_FIRST = re.compile(r"(.*\.)?layers\.(\d+)\.eh_proj\.weight")
_FURTHER = re.compile(r"(mtp_)?layers\.[1-9]")
_EXPERT = re.compile(r"layers\.0\.mlp\.experts\.(\d+)\.(.*)")


def num_mtp_layers(files: Checkpoint) -> int:
    """Return how many MTP layers a target's config.json says that its checkpoint has."""
    text = files.part("text_config") or files.config
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        number = text.get(key)
        if isinstance(number, int) and number > 0:
            return number
    return 0


def has_mtp(names: frozenset[str]) -> bool:
    """Return whether a target's checkpoint has the tensors of an MTP head in one of the layouts that are read."""
    return "mtp.fc.weight" in names or any(_FIRST.fullmatch(name) for name in names)


def read_eagle1(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read an EAGLE-1 or EAGLE-2 head, which are the same: 2 makes its trees at run time.

    Raises ConfigError for whatever is missing, unknown or does not fit, by its name.
    """
    reader = HeadReader(files, target, read_tensors(files, _own_name))
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
    facts = _facts(reader, layers, joins_normed=False, join_bias=has_bias)
    return reader.complete(facts, JoinedHead, "an EAGLE-1 head", OpeningMap.identity(facts.width))


def read_mtp(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read an MTP head, of several layers the first, which then drafts one token after the other on its own carries.

    Raises ConfigError as `read_eagle1` does.
    """
    layers, carries_normed, undecided = deepcopy(target.config.get_text_config(decoder=True)), True, ()
    if files.is_wrapped:
        tensors = _taken(files, "", SPECULATORS, "mtp_layers.0.")
    elif "mtp.fc.weight" in files.names:
        tensors = _taken(files, "mtp.", QWEN, "layers.0.")
    else:
        tensors = _taken(files, _prefix(files, target.num_layers), IN_LAYER, "")
        carries_normed, undecided = layers.model_type.startswith("glm"), ("carries_normed",)
    reader = HeadReader(files, target, tensors)
    if files.is_wrapped:
        layers = reader.layers()
    _one_layer(layers, is_sparse=any(name.startswith("layers.0.mlp.experts.") for name in tensors))
    facts = _facts(reader, layers, joins_normed=True, carries_normed=carries_normed)
    reader.fill_from_target(facts)
    _convert_layer(reader, layers)
    return reader.complete(facts, JoinedHead, "an MTP head", OpeningMap.identity(facts.width), undecided)


def _facts(reader: HeadReader, layers: PreTrainedConfig, **facts: bool) -> JoinedConfig:
    """Return the facts of a head of these layers, of which it has the target's vocabulary."""
    target = reader.target
    layers.vocab_size, layers.pad_token_id = target.vocab_size, None
    if layers.hidden_size != target.width:
        raise reader.refusal(
            f"is {layers.hidden_size} wide and {target.model} {target.width}; give the target that it was made for",
            param="target_model",
        )
    return JoinedConfig.of(layers, **facts)


def _own_name(name: str) -> str:
    return re.sub(r"^fc\.", "eh_proj.", re.sub(r"^layers\.", "model.layers.", name))


def _prefix(files: Checkpoint, num_layers: int) -> str:
    """Return what stands before the names of the first MTP layer."""
    found = [match for name in sorted(files.names) if (match := _FIRST.fullmatch(name))]
    for match in found:
        if int(match[2]) == num_layers:
            return match[0].removesuffix("eh_proj.weight")
    raise files.refusal(
        f"is at {', '.join(match[0] for match in found) or 'no layer'}, must be behind "
        f"the target's {num_layers} layers",
        of=MTP,
    )


def _taken(files: Checkpoint, prefix: str, names: Mapping[str, str], layer: str) -> dict[str, Tensor]:
    """Return the tensors behind a prefix: those of `names` under our names, and what begins with `layer` as layer 0."""
    taken, unknown = {}, list[str]()
    for name in sorted(files.names):
        short = name.removeprefix(prefix)
        if IGNORED.fullmatch(name) or not name.startswith(prefix):
            continue
        if short in names:
            taken[names[short]] = files.tensor(name)
        elif short.startswith(layer):
            taken[f"layers.0.{short.removeprefix(layer)}"] = files.tensor(name)
        elif not _FURTHER.match(short):
            unknown.append(name)
    if unknown:
        raise files.refusal(f"has tensors that no such head has: {', '.join(unknown[:4])}", of=MTP)
    return taken


def _one_layer(layers: PreTrainedConfig, *, is_sparse: bool) -> None:
    """Make the configuration of a target that of its MTP layer alone."""
    layers.num_hidden_layers = 1
    types = getattr(layers, "layer_types", None)
    if types is not None:
        layers.layer_types = ["indexed_attention" if "indexed_attention" in types else "full_attention"]
    if getattr(layers, "mlp_layer_types", None) is not None:
        layers.mlp_layer_types = ["sparse" if is_sparse else "dense"]
    if hasattr(layers, "first_k_dense_replace"):
        layers.first_k_dense_replace = 0 if is_sparse else 1


def _convert_layer(reader: HeadReader, layers: PreTrainedConfig) -> None:
    """Make the tensors those of `JoinedHead`: the layer's as transformers' class of it has them, which lays the experts
    of a checkpoint side by side.
    """
    model_class: Any = MODEL_MAPPING[type(layers)]
    around = JOINING - {"embed_tokens.weight", "norm.weight"}
    given = {name: tensor for name, tensor in reader.tensors.items() if name not in around}
    reader.refuse("not all tensors", _missing_experts(given), of=MTP)
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = model_class.from_pretrained(
            None,
            config=deepcopy(layers),
            state_dict=given,
            dtype=next(iter(given.values())).dtype,
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
    reader.tensors = {name: tensor for name, tensor in reader.tensors.items() if name in JOINING}
    for name, tensor in model.layers.state_dict().items():
        reader.tensors[f"model.layers.{name}"] = tensor


def _missing_experts(names: Iterable[str]) -> list[str]:
    """Return the tensors of experts that others have and they lack: transformers would say that there are some."""
    found = dict[str, set[str]]()
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            found.setdefault(match[1], set()).add(match[2])
    parts = set[str]().union(*found.values())
    return [f"experts.{expert}.{part}" for expert, own in found.items() for part in parts - own]
