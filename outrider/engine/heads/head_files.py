"""What the readers of heads' files share: whatever the kind, what does not fit is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.llama_head import shape_of
from outrider.engine.heads.network import HeadFacts, HeadNetwork
from outrider.engine.heads.opening import DTYPES, OpeningMap
from outrider.engine.loading.model_files import first_line
from outrider.engine.loading.weight_headers import bounded_build
from outrider.engine.paths.block_cache import layer_limits
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger

log = get_logger(__name__)

IGNORED = re.compile(r"verifier_(lm_head|norm)\.weight|.*rotary_emb\.inv_freq")
"""Tensors that some trainers save and no head reads: copies of the target's, and frequencies that the config gives."""
MAPS = ("d2t", "t2d", "token_map")
"""Tensors of ids."""
PADDED = {
    "embed_tokens.weight": "vocab_size",
    "markov_head.markov_w1.weight": "vocab_size",
    "lm_head.weight": "draft_vocab_size",
    "markov_head.markov_w2.weight": "draft_vocab_size",
}
"""Tensors that may have rows of padding, and the fact that counts the others."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as its files give it."""

    facts: Any
    """HeadFacts, of the head's kind."""
    tensors: Mapping[str, Tensor]
    """For the `of` of its class, in the files' dtype; embedding and lm_head may be the target's."""
    opening: OpeningMap
    """For the target, in the files' dtype."""
    undecided: tuple[str, ...] = ()
    """Fields of `facts`, each true or false, that the files leave open: the value there is the likelier one."""


class Keys:
    """A configuration whose keys may stand at the top level or in parts of it."""

    def __init__(self, files: Checkpoint, *parts: str) -> None:
        self._model = files.model
        self._places = [files.config, *(files.part(part) for part in parts)]

    def get(self, *names: str) -> Any:
        """Return the value of a key that has these names, None where it is not there.

        Raises ConfigError where it is there twice and differs.
        """
        found = list[Any]()
        for name in names:
            found += [place[name] for place in self._places if place.get(name) is not None]
        for value in found:
            if value != found[0]:
                raise ConfigError(
                    f"{' or '.join(names)} of {self._model} is both {found[0]} and {value}; leave one of them in "
                    "config.json",
                    param="model",
                )
        return found[0] if found else None

    def number(self, *names: str, least: int, most: int | None = None) -> int:
        """Return a whole number. Raises ConfigError for anything else, and outside these bounds."""
        value = self.get(*names)
        if type(value) is not int or value < least or (most is not None and value > most):
            bounds = f"from {least} on" if most is None else f"from {least} to {most}"
            raise ConfigError(
                f"{names[0]} of {self._model} is {value!r}, must be a whole number {bounds}; correct its config.json",
                param="model",
            )
        return value

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise ConfigError(f"{name} of {self._model} is {value!r}, must be true or false", param="model")
        return value


def masked_id(files: Checkpoint, names: Sequence[str], vocab_size: Any) -> int:
    """Return the id that stands for a masked position, under the first of these keys that is there.

    Raises ConfigError for one that is no id of the vocabulary.
    """
    name = next((name for name in names if files.config.get(name) is not None), names[0])
    token = files.config.get(name)
    if type(token) is not int or not isinstance(vocab_size, int) or not 0 <= token < vocab_size:
        raise ConfigError(
            f"{name} of {files.model} is {token!r}, must be an id of its vocabulary of {vocab_size}", param="model"
        )
    return token


def read_tensors(files: Checkpoint, own_name: Callable[[str], str] = lambda name: name) -> dict[str, Tensor]:
    """Return a head's tensors under our names. Raises ConfigError for numbers that cannot be served."""
    tensors = {own_name(name): files.tensor(name) for name in sorted(files.names) if not IGNORED.fullmatch(name)}
    check_values(files, tensors)
    return tensors


def check_values(files: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name in MAPS:
            continue
        if tensor.dtype not in DTYPES:
            raise ConfigError(
                f"{name} of {files.model} is {tensor.dtype}, must be float32, bfloat16 or float16; heads are not "
                "served quantised",
                param="model",
            )
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"{name} of {files.model} has numbers that are not finite; get the file again or retrain")


def layer_config(files: Checkpoint, raw: Any = None, *, has_windows: bool = False) -> PreTrainedConfig:
    """Read the layers' configuration through its class: files leave out what equals the class's defaults.

    raw: what config.json has of them, where that is not the whole of it, or speculators' part. has_windows: whether
    layers may have a sliding window.
    """
    if raw is None:
        raw = files.config.get("transformer_layer_config") if files.is_wrapped else files.config
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
    """Return the hidden states that the keys of a configuration name; the default where none names any."""
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
    """Return the hidden states of a list of layers' ids, each moved by `shift`; None where there is no list."""
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
        "num_layers": layers.num_hidden_layers,
        "width": width,
        "rope": _rope_of(files, layers),
        "vocab_size": vocab_size,
        "draft_vocab_size": _draft_vocab_size_of(files, tensors, layers, vocab_size),
        "taps": taps,
        "target_width": target.width,
    }


def _opened_width(files: Checkpoint, tensors: Mapping[str, Tensor], target: TargetFiles, taps: tuple[int, ...]) -> int:
    fc = tensors.get("fc.weight")
    target_width = files.config.get("target_hidden_size")
    if fc is None or fc.dim() != 2:
        raise ConfigError(f"{files.model} has no matrix fc.weight", param="model")
    if fc.shape[1] != len(taps) * target.width or target_width not in (None, target.width):
        raise ConfigError(
            f"fc.weight of {files.model} reads {fc.shape[1]} numbers, and {len(taps)} hidden states of {target.model} "
            f"are {len(taps)} x {target.width} = {len(taps) * target.width} (target_hidden_size is {target_width}); "
            "give the target that it was made for",
            param="target_model",
        )
    return int(fc.shape[0])


def vocab_size_of(files: Checkpoint, layers: PreTrainedConfig, target: TargetFiles) -> int:
    """Return V, of the target; a head may have rows of padding more, which are never kept."""
    if layers.vocab_size < target.vocab_size:
        raise ConfigError(
            f"{files.model} knows {layers.vocab_size} ids (vocab_size), and {target.model} has {target.vocab_size}; "
            "give the target that it was made for",
            param="target_model",
        )
    return target.vocab_size


def _draft_vocab_size_of(
    files: Checkpoint, tensors: Mapping[str, Tensor], layers: PreTrainedConfig, vocab_size: int
) -> int:
    """Return Vd, rows of the lm_head; vocab_size, the target's, where it has a row for each id: rows of padding are cut
    with the target's.
    """
    num_rows: int = layers.vocab_size
    configured = files.config.get("draft_vocab_size")
    if configured is not None:
        num_rows = configured = Keys(files).number("draft_vocab_size", least=1)
    lm_head = tensors.get("lm_head.weight")
    if lm_head is not None:
        if lm_head.dim() != 2:
            raise ConfigError(
                f"lm_head.weight of {files.model} is {list(lm_head.shape)}, must be a matrix; get the file again",
                param="model",
            )
        num_rows = lm_head.shape[0]
    if configured not in (None, num_rows):
        raise ConfigError(
            f"lm_head.weight of {files.model} has {num_rows} rows, and draft_vocab_size is {configured}; correct its "
            "config.json or get the file again",
            param="model",
        )
    return vocab_size if num_rows == layers.vocab_size else num_rows


def _rope_of(files: Checkpoint, layers: PreTrainedConfig) -> dict[str, Any]:
    rope = dict(layers.rope_parameters or {})
    is_known = rope.get("rope_type", "default") in ("default", *ROPE_INIT_FUNCTIONS)
    if not is_known or rope.get("partial_rotary_factor") not in (None, 1) or "rope_theta" not in rope:
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
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if facts.draft_vocab_size != facts.vocab_size:
        tensors["draft_ids"] = target_ids(files.model, d2t, t2d, facts.draft_vocab_size, facts.vocab_size)
    elif d2t is not None and bool(d2t.any()):
        raise ConfigError(f"d2t of {files.model} moves ids although its lm_head has a row for each", param="model")
    elif t2d is not None and not bool(t2d[: facts.vocab_size].all()):
        raise ConfigError(f"t2d of {files.model} leaves ids out although its lm_head has a row for each", param="model")
    fill_from_target(files, tensors, facts, target)
    check_shapes(files, tensors, head_class, facts, kind)


def target_ids(model: str, d2t: Tensor | None, t2d: Tensor | None, num_rows: int, vocab_size: int) -> Tensor:
    """Return the target ids [Vd] int64 of a head's rows, from its d2t (offsets: row i is id i + d2t[i]) and t2d.

    Raises ConfigError where there is neither, or they disagree or do not fit.
    """
    for name, given in (("d2t", d2t), ("t2d", t2d)):
        if given is not None and given.dim() != 1:
            raise ConfigError(
                f"{name} of {model} is {list(given.shape)}, must be a list; get the file again", param="model"
            )
    kept = None if t2d is None else t2d.to(torch.bool).nonzero().flatten()
    if d2t is not None:
        name, ids = "d2t", torch.arange(len(d2t)) + d2t.to(torch.int64)
    elif kept is not None:
        name, ids = "t2d", kept
    else:
        raise ConfigError(
            f"{model} has {num_rows} rows for a vocabulary of {vocab_size}, and neither d2t nor t2d says which; "
            "correct draft_vocab_size of its config.json, or get the file again",
            param="model",
        )
    if len(ids) != num_rows:
        raise ConfigError(f"{name} of {model} keeps {len(ids)} ids and its lm_head has {num_rows} rows", param="model")
    check_ids(model, name, ids, vocab_size)
    if kept is not None and not torch.equal(ids, kept):
        raise ConfigError(
            f"d2t and t2d of {model} disagree: d2t must hold offsets, so that row i is the id i + d2t[i], in the order "
            "of the ids that t2d keeps",
            param="model",
        )
    return ids


def check_ids(model: str, name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise ConfigError for ids [Vd] that repeat or are outside the vocabulary."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ConfigError(
            f"{name} of {model} leads to the id {int(outside[0])}, and the target's end at {vocab_size - 1}; "
            "give the target that it was made for, or get the file again",
            param="model",
        )
    numbers, counts = ids.unique(return_counts=True)
    if len(numbers) != len(ids):
        twice = int(numbers[counts > 1][0])
        raise ConfigError(f"{name} of {model} leads to an id twice, {twice}; get the file again", param="model")


def fill_from_target(files: Checkpoint, tensors: dict[str, Tensor], facts: HeadFacts, target: TargetFiles) -> None:
    """Cut rows of padding, and take the embedding and the lm_head's rows from the target where the head has none.

    A head that ties both (tie_word_embeddings) has its own embedding as its lm_head.
    """
    ids = tensors.get("draft_ids")
    if files.config.get("tie_word_embeddings") and "embed_tokens.weight" in tensors:
        tensors.setdefault("lm_head.weight", _rows(tensors["embed_tokens.weight"], ids))
    missing = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensors]
    if missing and facts.width != target.width:
        raise ConfigError(
            f"{files.model} has no {missing[0]}, and the target's does not fit: it is {target.width} wide and the head "
            f"{facts.width}",
            param="model",
        )
    dtype = next((tensor.dtype for name, tensor in tensors.items() if name.endswith("_proj.weight")), torch.float32)
    for name in missing:
        lent = target.embedding() if name == "embed_tokens.weight" else _rows(target.projection(), ids)
        tensors[name] = lent.to(dtype)
    for name, count in PADDED.items():
        num_rows = getattr(facts, count)
        if name in tensors and len(tensors[name]) > num_rows:
            tensors[name] = tensors[name][:num_rows].clone()  # not a view, which would keep the rest in memory


def _rows(table: Tensor, ids: Tensor | None) -> Tensor:
    return table if ids is None else table.index_select(0, ids)


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
                f"{name} of {files.model} is {list(tensors[name].shape)}, and by its config.json and the target's must "
                f"be {shape}",
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
