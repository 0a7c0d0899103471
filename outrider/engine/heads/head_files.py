"""What the readers of heads' files share: whatever the kind, what does not fit is refused by its name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.llama_head import llama_layers
from outrider.engine.heads.network import HeadFacts, HeadNetwork
from outrider.engine.heads.opening import DTYPES, OpeningMap
from outrider.engine.loading.model_files import first_line
from outrider.engine.loading.weight_headers import bounded_build
from outrider.engine.paths.block_cache import layer_limits
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger

log = get_logger(__name__)

IGNORED = re.compile(
    r"verifier_(lm_head|norm)\.weight|.*rotary_emb\.inv_freq|confidence_head\.proj\.(weight|bias)"
    r"|mtp[._]layers\.[1-9]\d*\..*"
)
"""Tensors that no head reads: copies of the target's, frequencies that the config gives, DSpark's guess of what is
accepted (the target chooses K), and MTP layers behind the first.
"""
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
    """Keys of config.json, of the right kind. All methods raise ConfigError for a value that is not, by its name."""

    def __init__(self, files: Checkpoint, *parts: str) -> None:
        """parts: keys under which there may be more keys."""
        self.files = files
        self.config = files.config
        self.refusal = files.refusal
        self._places = [files.config, *(files.part(part) for part in parts)]

    def get(self, *names: str) -> Any:
        """Return the value of a key that has these names, None where it is not there; twice, it must not differ."""
        found = list[Any]()
        for name in names:
            found += [place[name] for place in self._places if place.get(name) is not None]
        for value in found:
            if value != found[0]:
                both = f"is both {found[0]} and {value}; leave one of them in config.json"
                raise self.refusal(both, of=" or ".join(names))
        return found[0] if found else None

    def number(self, *names: str, least: int, most: int = sys.maxsize) -> int:
        """Return the whole number within these bounds of a key that has these names."""
        value = self.get(*names)
        if type(value) is not int or not least <= value <= most:
            bounds = f"from {least} to {most}" if most < sys.maxsize else f"from {least} on"
            name = next((name for name in names if self.get(name) is not None), names[0])
            raise self.refusal(f"is {value!r}, must be a whole number {bounds}; correct its config.json", of=name)
        return value

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise self.refusal(f"is {value!r}, must be true or false", of=name)
        return value


class HeadReader(Keys):
    """Reads the files of one head for a target. All methods raise ConfigError for what does not fit, by its name."""

    def __init__(
        self,
        files: Checkpoint,
        target: TargetFiles,
        names: Sequence[tuple[str, str]] = (),
        *,
        prefix: str = "",
        parts: Sequence[str] = (),
    ) -> None:
        """Read all tensors under our names. Raise ConfigError for those that cannot be served.

        names: patterns of beginnings of the files' names, and what is ours in their place; the first that matches
        counts. prefix: of the tensors that are read, in front of these names. parts: as `Keys`.
        """
        super().__init__(files, *parts)
        self.target = target
        self.tensors = dict[str, Tensor]()
        unused = list[str]()
        for name in sorted(files.names):
            if not name.startswith(prefix):
                continue
            if IGNORED.fullmatch(name):
                unused.append(name)
                continue
            own = _own_name(name.removeprefix(prefix), names)
            self.tensors[own] = self._read(name, is_map=own in MAPS)
        if unused:
            log.info("%s has %d tensors that are not used, such as %s", files.model, len(unused), unused[0])

    def _read(self, name: str, *, is_map: bool) -> Tensor:
        tensor = self.files.tensor(name)
        if not tensor.dim() or (is_map and tensor.dim() > 1):
            raise self.refusal(f"is {list(tensor.shape)}, must be a list; get the file again", of=name)
        if is_map:
            return tensor
        if tensor.dtype not in DTYPES:
            raise self.refusal(
                f"is {tensor.dtype}, must be float32, bfloat16 or float16; heads are not served quantised", of=name
            )
        if not bool(tensor.isfinite().all()):
            raise self.refusal("has numbers that are not finite; get the file again or retrain", of=name)
        return tensor

    def layers(self, raw: Any = None, *, has_windows: bool = False) -> PreTrainedConfig:
        """Read the layers' configuration through its class: files leave out what equals the class's defaults.

        raw: what config.json has of them, where that is not the whole of it, or speculators' part. has_windows: whether
        layers may have a sliding window.
        """
        if raw is None:
            raw = self.config.get("transformer_layer_config") if self.files.is_wrapped else self.config
        if not isinstance(raw, dict):
            raise self.refusal("has no transformer_layer_config", of="config.json")
        fields = {name: value for name, value in raw.items() if name not in ("model_type", "architectures", "auto_map")}
        num_tensors = len(self.files.names)
        try:
            config = AutoConfig.for_model(raw.get("model_type", "llama"), **fields)
            text: PreTrainedConfig = config.get_text_config(decoder=True)
            if text.hidden_act != "silu":
                raise ValueError(f"hidden_act is {text.hidden_act!r}, must be 'silu'")
            if text.hidden_size % text.num_attention_heads or text.num_attention_heads % text.num_key_value_heads:
                raise ValueError(
                    f"{text.num_attention_heads} heads must divide hidden_size, {text.hidden_size}, and be a multiple "
                    f"of num_key_value_heads, {text.num_key_value_heads}"
                )
            if not 1 <= text.num_hidden_layers <= num_tensors:
                raise ValueError(f"num_hidden_layers is {text.num_hidden_layers}, and there are {num_tensors} tensors")
            limits = [layer_limits(text, index) for index in range(text.num_hidden_layers)]
        except Exception as error:  # transformers' validation has its own kinds, and classes lack what a head needs
            model = self.files.model
            raise ConfigError(f"cannot read config.json of {model}: {first_line(error)}", param="model") from error
        if any((window is not None and not has_windows) or chunk is not None for window, chunk in limits):
            raise self.refusal("has layers with a sliding window, which heads are not served with")
        if text.vocab_size < self.target.vocab_size:  # a head may have rows of padding more, which are never kept
            raise self.refusal(
                f"knows {text.vocab_size} ids (vocab_size), and {self.target.model} has {self.target.vocab_size}; give "
                "the target that it was made for",
                param="target_model",
            )
        return text

    def taps(self, keys: Mapping[str, tuple[Any, int]], default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the hidden states that the configuration names, of the target's 0 to its number of layers.

        keys: by their name in messages, the lists of ids that are there, None where there is none, and by how much an
        id is behind its hidden state's number. default: where there is no list, as published.
        """
        num_layers = self.target.num_layers
        given = dict[str, tuple[int, ...]]()
        for name, (ids, shift) in keys.items():
            if ids is None or ids == []:  # some exporters write an empty list for the default
                continue
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise self.refusal(f"are {ids!r}, must be a list of whole numbers", of="layer ids")
            given[name] = tuple(i + shift for i in ids)
        if len(set(given.values())) > 1:
            meanings = " and ".join(f"{name} means the hidden states {list(taps)}" for name, taps in given.items())
            raise self.refusal(f"names different layers: {meanings} (0 = the embeddings); leave one of them")
        if not given:
            log.warning(
                "%s does not say which hidden states it reads (%s): taken are %s of its target's 0 to %d, as published",
                *(self.files.model, ", ".join(keys), list(default), num_layers),
            )
        taps = next(iter(given.values()), default)
        if any(not 0 <= tap <= num_layers for tap in taps):
            raise self.refusal(
                f"reads the hidden states {list(taps)} of its target, which has {num_layers} layers and hence those "
                f"from 0 to {num_layers}; is it another target's head?",
                param="target_model",
            )
        return taps

    def llama_facts(self, layers: PreTrainedConfig, taps: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields of LlamaFacts, of the configuration of the layers."""
        vocab_size = self.target.vocab_size
        width = self._take_width(taps)
        rope = dict(layers.rope_parameters or {})
        is_known = rope.get("rope_type", "default") in ("default", *ROPE_INIT_FUNCTIONS)
        if not is_known or rope.get("partial_rotary_factor") not in (None, 1) or "rope_theta" not in rope:
            raise self.refusal(f"are {rope}, which heads are not served with", of="rotary positions")
        num_rows = self._num_rows(layers)
        return {
            "layers": llama_layers(layers, width, vocab_size, layers.num_hidden_layers, rope),
            "width": width,
            "vocab_size": vocab_size,
            # rows of padding are cut with the target's
            "draft_vocab_size": vocab_size if num_rows == layers.vocab_size else num_rows,
            "taps": taps,
            "target_width": self.target.width,
        }

    def _take_width(self, taps: tuple[int, ...]) -> int:
        fc = self.tensors.get("fc.weight")
        if fc is None or fc.dim() != 2:
            raise self.refusal("has no matrix fc.weight")
        self.check_tapped("fc.weight", fc.shape[1], len(taps))
        return int(fc.shape[0])

    def check_tapped(self, name: str, num_read: int, num_taps: int) -> None:
        """Raise ConfigError unless a tensor that reads so many numbers reads so many of the target's hidden states."""
        width, model = self.target.width, self.target.model
        if num_read != num_taps * width:
            raise self.refusal(
                f"reads {num_read} numbers, and {num_taps} hidden states of {model} are {num_taps} x {width} = "
                f"{num_taps * width}; give the target that it was made for",
                of=name,
                param="target_model",
            )

    def _num_rows(self, layers: PreTrainedConfig) -> int:
        """Return how many rows the lm_head has."""
        configured = None
        if self.config.get("draft_vocab_size") is not None:
            configured = self.number("draft_vocab_size", least=1)
        lm_head = self.tensors.get("lm_head.weight")
        if lm_head is None:
            return configured or layers.vocab_size
        if lm_head.dim() != 2:
            raise self.refusal(f"is {list(lm_head.shape)}, must be a matrix; get the file again", of="lm_head.weight")
        if configured not in (None, len(lm_head)):
            raise self.refusal(
                f"has {len(lm_head)} rows, and draft_vocab_size is {configured}; correct its config.json or get the "
                "file again",
                of="lm_head.weight",
            )
        return len(lm_head)

    def take_norm(self, name: str, width: int) -> Tensor:
        """Take a norm's weight of that width out of the tensors."""
        norm = self.tensors.pop(name, None)
        shape = "missing" if norm is None else list(norm.shape)
        if norm is None or shape != [width]:
            raise self.refusal(f"is {shape}, must be [{width}]; get the file again", of=name)
        return norm

    def complete(
        self,
        facts: HeadFacts,
        network: type[HeadNetwork],
        opening: OpeningMap,
        undecided: tuple[str, ...] = (),
    ) -> HeadFiles:
        """Return the head: its tensors are those of the network, with what the target lends."""
        d2t, t2d = self.tensors.pop("d2t", None), self.tensors.pop("t2d", None)
        if facts.draft_vocab_size != facts.vocab_size:
            self.tensors["draft_ids"] = target_ids(self.files, d2t, t2d, facts.draft_vocab_size, facts.vocab_size)
        elif d2t is not None and bool(d2t.any()):
            raise self.refusal("moves ids although its lm_head has a row for each", of="d2t")
        elif t2d is not None and not bool(t2d[: facts.vocab_size].all()):
            raise self.refusal("leaves ids out although its lm_head has a row for each", of="t2d")
        self.fill_from_target(facts)
        self.check_shapes(facts, network)
        return HeadFiles(facts, self.tensors, opening, undecided)

    def fill_from_target(self, facts: HeadFacts) -> None:
        """Cut rows of padding, and take the embedding and the lm_head's rows from the target where the head has none.

        A head that ties both (tie_word_embeddings) has its own embedding as its lm_head.
        """
        tensors, target = self.tensors, self.target
        ids = tensors.get("draft_ids")
        if self.config.get("tie_word_embeddings") and "embed_tokens.weight" in tensors:
            tensors.setdefault("lm_head.weight", _rows(tensors["embed_tokens.weight"], ids))
        missing = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in tensors]
        if missing and facts.width != target.width:
            raise self.refusal(
                f"has no {missing[0]}, and the target's does not fit: it is {target.width} wide and the head "
                f"{facts.width}"
            )
        dtype = next((tensor.dtype for name, tensor in tensors.items() if name.endswith("_proj.weight")), torch.float32)
        for name in missing:
            lent = target.embedding() if name == "embed_tokens.weight" else _rows(target.projection(), ids)
            tensors[name] = lent.to(dtype)
        for name, count in PADDED.items():
            num_rows = getattr(facts, count)
            if name in tensors and len(tensors[name]) > num_rows:
                tensors[name] = tensors[name][:num_rows].clone()  # not a view, which would keep the rest in memory

    def check_shapes(self, facts: HeadFacts, network: type[HeadNetwork]) -> None:
        """Raise ConfigError unless the tensors are those of such a network."""
        tensors = self.tensors
        with bounded_build(f"the config.json of {self.files.model}", len(self.files.names)):
            shapes = {name: list(tensor.shape) for name, tensor in network(facts).state_dict().items()}
        self.refuse(f"tensors that its {network.__name__} does not have", tensors.keys() - shapes.keys())
        self.refuse("not all tensors", shapes.keys() - tensors.keys())
        for name, shape in shapes.items():
            found = list(tensors[name].shape)
            if found != shape:
                raise self.refusal(
                    f"is {found}, and by its config.json and the target's must be {shape}; give the target that it was "
                    "made for, or get the file again",
                    of=name,
                )

    def refuse(self, what: str, names: Iterable[str], *, of: str = "") -> None:
        """Raise ConfigError where there are such tensors."""
        found = sorted(names)
        if found:
            more = " and more" * (len(found) > 4)
            raise self.refusal(
                f"has {what}: {', '.join(found[:4])}{more}; correct its config.json or get the file again", of=of
            )


def _own_name(name: str, names: Sequence[tuple[str, str]]) -> str:
    for pattern, own in names:
        match = re.match(pattern, name)
        if match is not None:
            return match.expand(own) + name[match.end() :]
    return name


def target_ids(files: Checkpoint, d2t: Tensor | None, t2d: Tensor | None, num_rows: int, vocab_size: int) -> Tensor:
    """Return the target ids [Vd] int64 of a head's rows, from its d2t (offsets: row i is id i + d2t[i]) and t2d.

    Raises ConfigError where there is neither, or they disagree or do not fit.
    """
    kept = None if t2d is None else t2d.to(torch.bool).nonzero().flatten()
    if d2t is not None:
        name, ids = "d2t", torch.arange(len(d2t)) + d2t.to(torch.int64)
    elif kept is not None:
        name, ids = "t2d", kept
    else:
        raise files.refusal(
            f"has {num_rows} rows for a vocabulary of {vocab_size}, and neither d2t nor t2d says which; correct "
            "draft_vocab_size of its config.json, or get the file again"
        )
    if len(ids) != num_rows:
        raise files.refusal(f"keeps {len(ids)} ids and its lm_head has {num_rows} rows", of=name)
    check_ids(files, name, ids, vocab_size)
    if kept is not None and not torch.equal(ids, kept):
        raise files.refusal(
            "disagree: d2t must hold offsets, so that row i is the id i + d2t[i], in the order of t2d's ids",
            of="d2t and t2d",
        )
    return ids


def check_ids(files: Checkpoint, name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise ConfigError for ids [Vd] that repeat or are outside the vocabulary."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise files.refusal(
            f"leads to the id {int(outside[0])}, and the target's end at {vocab_size - 1}; give the target that it was "
            "made for, or get the file again",
            of=name,
        )
    numbers, counts = ids.unique(return_counts=True)
    if len(numbers) != len(ids):
        raise files.refusal(f"leads to an id twice, {int(numbers[counts > 1][0])}; get the file again", of=name)


def _rows(table: Tensor, ids: Tensor | None) -> Tensor:
    return table if ids is None else table.index_select(0, ids)
