"""Read EAGLE-3 heads in the layouts that people hold: the original repository's, SpecForge's, speculators', DeepSpec's.

They differ in names, in what a layer id means, in which norms there are and in what is carried; a wrong reading drafts
fluently and is accepted less. What a file leaves open is named in `HeadFiles.undecided`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.heads.carry_head import HeadFacts, HeadFiles
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.engine.heads.maps import target_ids
from outrider.engine.heads.opening import DTYPES, Norm, OpeningMap, OpeningSpec
from outrider.engine.heads.target_files import TargetFiles
from outrider.engine.loading.model_files import first_line
from outrider.engine.paths.block_cache import layer_limits
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger

log = get_logger(__name__)

IGNORED = re.compile(r"verifier_(lm_head|norm)\.weight|.*rotary_emb\.inv_freq")
"""Tensors that some trainers save and no head reads: copies of the target's, and frequencies that the config gives."""


def read_eagle3(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read a head for that target. Raises ConfigError for whatever is missing, unknown or does not fit, by its name."""
    return eagle3_of(files, tensors_of(files), target)


def tensors_of(files: Checkpoint) -> dict[str, Tensor]:
    """Return a head's tensors under speculators' names. Raises ConfigError for numbers that cannot be served."""
    tensors = {_own_name(name): files.tensor(name) for name in sorted(files.names) if not IGNORED.fullmatch(name)}
    check_values(files, tensors)
    return tensors


def eagle3_of(files: Checkpoint, tensors: dict[str, Tensor], target: TargetFiles) -> HeadFiles:
    """Do as `read_eagle3` with the files' tensors, which are taken over."""
    facts, undecided = _facts(files, tensors, target)
    opening = _take_opening(files, tensors, facts)
    if facts.draft_vocab_size != facts.vocab_size:
        tensors["draft_ids"] = target_ids(files.model, tensors, facts.draft_vocab_size, facts.vocab_size)
    else:
        check_identity(files, tensors, facts)
    for name in ("d2t", "t2d"):
        tensors.pop(name, None)
    fill_from_target(files, tensors, facts, target)
    check_shapes(files, tensors, lambda: Eagle3Head(facts), "an EAGLE-3 head")
    return HeadFiles(facts, tensors, opening, undecided)


def _own_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def check_values(files: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d"):
            continue
        if tensor.dtype not in DTYPES:
            raise ConfigError(
                f"{name} of {files.model} is {tensor.dtype}, must be float32, bfloat16 or float16; heads are not "
                "served quantised",
                param="model",
            )
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"{name} of {files.model} has numbers that are not finite; get the file again or retrain")


def _facts(
    files: Checkpoint, tensors: Mapping[str, Tensor], target: TargetFiles
) -> tuple[Eagle3Config, tuple[str, ...]]:
    config = files.config
    is_wrapped = "speculators_model_type" in config
    inner = layer_config(files, config.get("transformer_layer_config") if is_wrapped else config)
    taps = _taps(files, target.num_layers)
    norm = _norm_kind(files, tensors, len(taps))
    width = opened_width(files, tensors, target, taps)
    said = config.get("draft_vocab_size")
    draft_vocab_size = int(said or inner.vocab_size)
    if "lm_head.weight" in tensors:
        draft_vocab_size = tensors["lm_head.weight"].shape[0]
        if said not in (None, draft_vocab_size):
            raise ConfigError(
                f"lm_head.weight of {files.model} has {draft_vocab_size} rows, and draft_vocab_size is {said}; correct "
                "its config.json or get the file again",
                param="model",
            )
    vocab_size = vocab_size_of(files, inner, target)
    if draft_vocab_size == inner.vocab_size:  # a whole vocabulary, whose rows of padding are cut with the target's
        draft_vocab_size = vocab_size
    carries_normed, reads_normed, open_carry = _norm_output(config, is_wrapped, norm)
    open_residual = is_wrapped and "norm_before_residual" not in config
    undecided = ("carries_normed",) * open_carry + ("norm_before_residual",) * open_residual
    facts = Eagle3Config(
        width=width,
        ffn_width=inner.intermediate_size,
        num_heads=inner.num_attention_heads,
        num_kv_heads=inner.num_key_value_heads,
        head_dim=getattr(inner, "head_dim", None) or inner.hidden_size // inner.num_attention_heads,
        epsilon=inner.rms_norm_eps,
        rope=rope_of(files, inner),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        taps=taps,
        target_width=target.width,
        norm=norm,
        num_layers=inner.num_hidden_layers,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        carries_normed=carries_normed,
        reads_normed=reads_normed,
        qk_norms="layers.0.self_attn.q_norm.weight" in tensors,
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        trained_context=inner.max_position_embeddings,
    )
    return facts, undecided


def layer_config(files: Checkpoint, raw: Any, *, has_windows: bool = False) -> PreTrainedConfig:
    """Read the layers' configuration through its class: files leave out what equals the class's defaults.

    has_windows: whether layers may have a sliding window.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"config.json of {files.model} has no transformer_layer_config", param="model")
    fields = {name: value for name, value in raw.items() if name not in ("model_type", "architectures", "auto_map")}
    try:
        config = AutoConfig.for_model(raw.get("model_type", "llama"), **fields)
        text: PreTrainedConfig = config.get_text_config(decoder=True)
        if text.hidden_act != "silu":
            raise ValueError(f"hidden_act is {text.hidden_act!r}, must be 'silu'")
        if text.hidden_size % text.num_attention_heads or text.num_attention_heads % text.num_key_value_heads:
            raise ValueError(
                f"{text.num_attention_heads} heads must divide hidden_size, {text.hidden_size}, and be a multiple of "
                f"num_key_value_heads, {text.num_key_value_heads}"
            )
        limits = [layer_limits(text, index) for index in range(text.num_hidden_layers)]
    except Exception as error:  # transformers' validation has its own kinds, and classes lack what a head needs
        raise ConfigError(f"cannot read config.json of {files.model}: {first_line(error)}", param="model") from error
    if any((window is not None and not has_windows) or chunk is not None for window, chunk in limits):
        raise ConfigError(f"{files.model} has layers with a sliding window, which heads are not served with")
    return text


def _taps(files: Checkpoint, num_layers: int) -> tuple[int, ...]:
    """Return the hidden states that the head reads: id k means h[k] at the top level, and h[k + 1] in the nested key of
    SpecForge and in DeepSpec's, which name a layer by its output.
    """
    said_nested = files.config.get("eagle_config")
    nested = said_nested if isinstance(said_nested, dict) else {}
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{files.model} reads no taps (use_aux_hidden_state is false), and such heads are not served")
    key = "eagle_aux_hidden_state_layer_ids"
    said = {
        key: layer_ids(files, files.config.get(key), 0),
        f"eagle_config.{key}": layer_ids(files, nested.get(key), 1),
        "target_layer_ids": layer_ids(files, files.config.get("target_layer_ids"), 1),
    }
    return agreed_taps(files, said, (2, num_layers // 2, num_layers - 3), num_layers)


def agreed_taps(
    files: Checkpoint, said: Mapping[str, tuple[int, ...] | None], default: tuple[int, ...], num_layers: int
) -> tuple[int, ...]:
    """Return the hidden states that the keys of a configuration say; the default where none says any."""
    given = {name: taps for name, taps in said.items() if taps is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(
            f"{files.model} names different layers: "
            + " and ".join(f"{name} means the hidden states {list(taps)}" for name, taps in given.items())
            + " (0 = the embeddings); leave one of them",
            param="model",
        )
    if not given:
        log.warning(
            "%s does not say which hidden states it reads (%s): taken are %s of its target's 0 to %d, as published",
            *(files.model, ", ".join(said), list(default), num_layers),
        )
    taps = next(iter(given.values()), default)
    if any(not 0 <= tap <= num_layers for tap in taps):
        raise ConfigError(
            f"{files.model} reads the hidden states {list(taps)} of its target, which has {num_layers} layers and "
            f"hence those from 0 to {num_layers}; is it another target's head?",
            param="target_model",
        )
    return taps


def layer_ids(files: Checkpoint, ids: Any, shift: int) -> tuple[int, ...] | None:
    if ids is None or ids == []:  # some exporters write an empty list for the default
        return None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ConfigError(f"layer ids of {files.model} are {ids!r}, must be a list of whole numbers", param="model")
    return tuple(i + shift for i in ids)


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
    return "each" if has_each else "all" if has_all else "none"


def opened_width(files: Checkpoint, tensors: Mapping[str, Tensor], target: TargetFiles, taps: tuple[int, ...]) -> int:
    fc = tensors.get("fc.weight")
    wanted = files.config.get("target_hidden_size")
    if fc is None or fc.dim() != 2:
        raise ConfigError(f"{files.model} has no matrix fc.weight", param="model")
    if fc.shape[1] != len(taps) * target.width or wanted not in (None, target.width):
        raise ConfigError(
            f"fc.weight of {files.model} reads {fc.shape[1]} numbers, and {len(taps)} hidden states of {target.model} "
            f"are {len(taps)} x {target.width} = {len(taps) * target.width}"
            f"{'' if wanted is None else f' (target_hidden_size is {wanted})'}; give the target that it was made for",
            param="target_model",
        )
    return int(fc.shape[0])


def vocab_size_of(files: Checkpoint, inner: PreTrainedConfig, target: TargetFiles) -> int:
    """Return V, of the target; a head may have rows of padding more, which are never kept."""
    if inner.vocab_size < target.vocab_size:
        raise ConfigError(
            f"{files.model} knows {inner.vocab_size} ids (vocab_size), and {target.model} has {target.vocab_size}; "
            "give the target that it was made for",
            param="target_model",
        )
    return target.vocab_size


def _norm_output(config: Mapping[str, Any], is_wrapped: bool, norm: Norm) -> tuple[bool, bool, bool]:
    """Return whether carries are normed, whether the lm_head reads the normed output, and whether the first is open.

    speculators' norm_output says the first. SpecForge's says the second, and its training carries what is not normed,
    also where its exports for 3.1 say true.
    """
    says = config.get("norm_output")
    if is_wrapped:
        return bool(says), True, False
    return False, says is not False, says is True and norm == "each"


def rope_of(files: Checkpoint, inner: PreTrainedConfig) -> dict[str, Any]:
    rope = dict(inner.rope_parameters or {})
    kind, partial = rope.get("rope_type", "default"), rope.get("partial_rotary_factor")
    if (
        (kind != "default" and kind not in ROPE_INIT_FUNCTIONS)
        or partial not in (None, 1, 1.0)
        or "rope_theta" not in rope
    ):
        raise ConfigError(
            f"rotary positions of {files.model} are {rope}, which heads are not served with", param="model"
        )
    return rope


def _take_opening(files: Checkpoint, tensors: dict[str, Tensor], facts: Eagle3Config) -> OpeningMap:
    """Take the opening map's tensors out of `tensors`."""
    taken = {"fc": tensors.pop("fc.weight")}
    if facts.norm != "none":
        is_each = facts.norm == "each"
        names = [f"fc_norm.{i}.weight" for i in range(len(facts.taps))] if is_each else ["input_norm.weight"]
        width = facts.target_width if is_each else facts.target_width * len(facts.taps)
        for name in names:
            shape = list(tensors[name].shape) if name in tensors else "missing"
            if shape != [width]:
                raise ConfigError(f"{name} of {files.model} is {shape}, must be [{width}]", param="model")
        norms = torch.stack([tensors.pop(name) for name in names]).to(taken["fc"].dtype)
        taken["norm"] = norms if is_each else norms[0]
    return OpeningMap(OpeningSpec(facts.taps, facts.width, facts.norm, facts.epsilon), taken)


def check_identity(files: Checkpoint, tensors: Mapping[str, Tensor], facts: HeadFacts) -> None:
    """Raise ConfigError for maps of a head with all rows that are not the identity."""
    if "d2t" in tensors and bool(tensors["d2t"].any()):
        raise ConfigError(f"d2t of {files.model} moves ids although its lm_head has a row for each", param="model")
    if "t2d" in tensors and not bool(tensors["t2d"][: facts.vocab_size].all()):
        raise ConfigError(f"t2d of {files.model} leaves ids out although its lm_head has a row for each", param="model")


def fill_from_target(files: Checkpoint, tensors: dict[str, Tensor], facts: HeadFacts, target: TargetFiles) -> None:
    """Cut rows of padding, and take the embedding and the lm_head's rows from the target where the head has none.

    A head that ties both (tie_word_embeddings) has its own embedding as its lm_head.
    """
    if files.config.get("tie_word_embeddings") and "embed_tokens.weight" in tensors:
        own, ids = tensors["embed_tokens.weight"], tensors.get("draft_ids")
        tensors.setdefault("lm_head.weight", own if ids is None else own.index_select(0, ids))
    dtype = next((tensor.dtype for name, tensor in tensors.items() if name.endswith("_proj.weight")), torch.float32)
    missing = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensors]
    if missing and facts.width != target.width:
        raise ConfigError(
            f"{files.model} has no {missing[0]}, and the target's does not fit: it is {target.width} wide and the head "
            f"{facts.width}",
            param="model",
        )
    if "embed_tokens.weight" in missing:
        tensors["embed_tokens.weight"] = target.embedding().to(dtype)
    if "lm_head.weight" in missing:
        rows, ids = target.projection(), tensors.get("draft_ids")
        tensors["lm_head.weight"] = (rows if ids is None else rows.index_select(0, ids)).to(dtype)
    for name, num_rows in (("embed_tokens.weight", facts.vocab_size), ("lm_head.weight", facts.draft_vocab_size)):
        if tensors[name].shape[0] > num_rows:
            tensors[name] = tensors[name][:num_rows].clone()  # not a view, which would keep the rest in memory


def check_shapes(files: Checkpoint, tensors: Mapping[str, Tensor], make: Callable[[], nn.Module], kind: str) -> None:
    """Raise ConfigError unless these are the tensors of the head that `make` makes. kind: as in "an EAGLE-3 head"."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    unknown, missing = sorted(tensors.keys() - shapes.keys()), sorted(shapes.keys() - tensors.keys())
    if unknown or missing:
        what, names = (
            (f"tensors that {kind} of its config does not have", unknown) if unknown else ("not all tensors", missing)
        )
        raise ConfigError(
            f"{files.model} has {what}: {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}; "
            "correct its config.json or get the file again",
            param="model",
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(
                f"{name} of {files.model} is {list(tensors[name].shape)}, and by its config.json must be {list(shape)}",
                param="model",
            )
