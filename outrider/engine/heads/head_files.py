"""What the readers of heads' files share: whatever the kind, what does not fit is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.head_network import HeadFacts, HeadNetwork, shape_of
from outrider.engine.heads.maps import target_ids
from outrider.engine.heads.opening import DTYPES
from outrider.engine.heads.target_files import TargetFiles
from outrider.engine.loading.model_files import first_line
from outrider.engine.loading.weight_headers import bounded_build
from outrider.engine.paths.block_cache import layer_limits
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger

log = get_logger(__name__)

IGNORED = re.compile(r"verifier_(lm_head|norm)\.weight|.*rotary_emb\.inv_freq")
"""Tensors that some trainers save and no head reads: copies of the target's, and frequencies that the config gives."""
ROW_PER_ID = ("embed_tokens.weight", "markov_head.markov_w1.weight")
ROW_PER_DRAFT = ("lm_head.weight", "markov_head.markov_w2.weight")
"""Tensors that may have rows of padding."""


def read_tensors(files: Checkpoint, own_name: Callable[[str], str] = lambda name: name) -> dict[str, Tensor]:
    """Return a head's tensors under our names. Raises ConfigError for numbers that cannot be served."""
    tensors = {own_name(name): files.tensor(name) for name in sorted(files.names) if not IGNORED.fullmatch(name)}
    check_values(files, tensors)
    return tensors


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


def is_wrapped(files: Checkpoint) -> bool:
    """Return whether the layout is speculators'."""
    return "speculators_model_type" in files.config


def layer_config(files: Checkpoint, raw: Any = None, *, has_windows: bool = False) -> PreTrainedConfig:
    """Read the layers' configuration through its class: files leave out what equals the class's defaults.

    raw: what config.json says of them, where that is not the whole of it, or speculators' part. has_windows: whether
    layers may have a sliding window.
    """
    if raw is None:
        raw = files.config.get("transformer_layer_config") if is_wrapped(files) else files.config
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
        if not 1 <= text.num_hidden_layers <= len(files.names):
            raise ValueError(f"num_hidden_layers is {text.num_hidden_layers}, and there are {len(files.names)} tensors")
        limits = [layer_limits(text, index) for index in range(text.num_hidden_layers)]
    except Exception as error:  # transformers' validation has its own kinds, and classes lack what a head needs
        raise ConfigError(f"cannot read config.json of {files.model}: {first_line(error)}", param="model") from error
    if any((window is not None and not has_windows) or chunk is not None for window, chunk in limits):
        raise ConfigError(f"{files.model} has layers with a sliding window, which heads are not served with")
    return text


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


def llama_facts(
    files: Checkpoint,
    tensors: Mapping[str, Tensor],
    layers: PreTrainedConfig,
    target: TargetFiles,
    taps: tuple[int, ...],
) -> dict[str, Any]:
    """Return the fields of LlamaFacts, of the configuration of the layers. Raises ConfigError for what does not fit."""
    width, vocab_size = _opened_width(files, tensors, target, taps), vocab_size_of(files, layers, target)
    return {
        **shape_of(layers),
        "width": width,
        "rope": _rope_of(files, layers),
        "vocab_size": vocab_size,
        "draft_vocab_size": _draft_vocab_size_of(files, tensors, layers, vocab_size),
        "taps": taps,
        "target_width": target.width,
    }


def _opened_width(files: Checkpoint, tensors: Mapping[str, Tensor], target: TargetFiles, taps: tuple[int, ...]) -> int:
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


def _draft_vocab_size_of(
    files: Checkpoint, tensors: Mapping[str, Tensor], inner: PreTrainedConfig, vocab_size: int
) -> int:
    """Return Vd, rows of the lm_head; vocab_size, the target's, where it has a row for each id: rows of padding are cut
    with the target's.
    """
    said = files.config.get("draft_vocab_size")
    if said is not None and (type(said) is not int or said < 1):
        raise ConfigError(
            f"draft_vocab_size of {files.model} is {said!r}, must be a whole number from 1 on; correct its config.json",
            param="model",
        )
    lm_head = tensors.get("lm_head.weight")
    if lm_head is not None and lm_head.dim() != 2:
        raise ConfigError(
            f"lm_head.weight of {files.model} is {list(lm_head.shape)}, must be a matrix; get the file again",
            param="model",
        )
    rows: int = said or inner.vocab_size if lm_head is None else lm_head.shape[0]
    if said not in (None, rows):
        raise ConfigError(
            f"lm_head.weight of {files.model} has {rows} rows, and draft_vocab_size is {said}; correct its config.json "
            "or get the file again",
            param="model",
        )
    return vocab_size if rows == inner.vocab_size else rows


def _rope_of(files: Checkpoint, inner: PreTrainedConfig) -> dict[str, Any]:
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


def take_norm(files: Checkpoint, tensors: dict[str, Tensor], name: str, width: int) -> Tensor:
    """Take a norm's weight out of `tensors`. Raises ConfigError where it is not there, or of another width."""
    norm = tensors.pop(name, None)
    shape = "missing" if norm is None else list(norm.shape)
    if norm is None or shape != [width]:
        raise ConfigError(f"{name} of {files.model} is {shape}, must be [{width}]", param="model")
    return norm


def complete(
    files: Checkpoint,
    tensors: dict[str, Tensor],
    facts: HeadFacts,
    target: TargetFiles,
    head_class: type[HeadNetwork],
    kind: str,
) -> None:
    """Make a file's tensors those of the network, with what the target lends.

    kind: as in "an EAGLE-3 head". Raises ConfigError where they do not fit.
    """
    if facts.draft_vocab_size != facts.vocab_size:
        tensors["draft_ids"] = target_ids(files.model, tensors, facts.draft_vocab_size, facts.vocab_size)
    else:
        _check_identity(files, tensors, facts)
    for name in ("d2t", "t2d"):
        tensors.pop(name, None)
    fill_from_target(files, tensors, facts, target)
    check_shapes(files, tensors, head_class, facts, kind)


def _check_identity(files: Checkpoint, tensors: Mapping[str, Tensor], facts: HeadFacts) -> None:
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
    for names, num_rows in ((ROW_PER_ID, facts.vocab_size), (ROW_PER_DRAFT, facts.draft_vocab_size)):
        for name in names:
            if name in tensors and len(tensors[name]) > num_rows:
                tensors[name] = tensors[name][:num_rows].clone()  # not a view, which would keep the rest in memory


def check_shapes(
    files: Checkpoint, tensors: Mapping[str, Tensor], head_class: type[HeadNetwork], facts: HeadFacts, kind: str
) -> None:
    """Raise ConfigError unless these are the tensors of such a head. kind: as in "an EAGLE-3 head"."""
    with bounded_build(f"the config.json of {files.model}", len(files.names)):
        shapes = {name: list(tensor.shape) for name, tensor in head_class(facts).state_dict().items()}
    refuse(files.model, f"tensors that {kind} of its config does not have", tensors.keys() - shapes.keys())
    refuse(files.model, "not all tensors", shapes.keys() - tensors.keys())
    for name, shape in shapes.items():
        if list(tensors[name].shape) != shape:
            raise ConfigError(
                f"{name} of {files.model} is {list(tensors[name].shape)}, and by its config.json must be {shape}",
                param="model",
            )


def refuse(whose: str, what: str, names: Iterable[str]) -> None:
    """Raise ConfigError where there are such tensors."""
    found = sorted(names)
    if found:
        raise ConfigError(
            f"{whose} has {what}: {', '.join(found[:4])}{' and more' if len(found) > 4 else ''}; "
            "correct its config.json or get the file again",
            param="model",
        )
