"""Shared parts of the readers of heads' files. They refuse a tensor or key that does not fit, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.attention.block_cache import layer_limits
from outrider.engine.files.model_files import MAX_QUOTED, first_line
from outrider.engine.files.weight_headers import bounded_build
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.config_keys import Keys
from outrider.engine.heads.draft_vocabulary import target_ids
from outrider.engine.heads.llama_head import llama_layers
from outrider.engine.heads.network import HeadFacts, HeadNetwork
from outrider.engine.heads.projection import DTYPES, Projection
from outrider.wire.errors import ConfigError
from outrider.wire.peer_text import bound_text
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

IGNORED = re.compile(
    r"verifier_(lm_head|norm)\.weight|.*rotary_emb\.inv_freq|confidence_head\.proj\.(weight|bias)"
    r"|mtp[._]layers\.[1-9]\d*\..*"
)
"""Pattern of names of tensors that are left unread: copies of the target's tensors, rotary frequencies (computed from
the config), DSpark's estimate of acceptance (the target chooses K), and MTP layers after the first."""
MAPS = ("d2t", "t2d", "token_map")
"""Names of tensors that hold token ids or offsets of token ids, which are read without a check of their dtype."""
PADDED = {
    "embed_tokens.weight": "vocab_size",
    "markov_head.markov_w1.weight": "vocab_size",
    "lm_head.weight": "draft_vocab_size",
    "markov_head.markov_w2.weight": "draft_vocab_size",
}
"""Names of tensors that may have padding rows. The value is the field of `HeadFacts` that states the number of rows
without padding."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Contents of a head's files, checked: what is needed to build its network."""

    facts: Any
    """Configuration of the network: the subclass of `HeadFacts` for the head's kind."""
    tensors: Mapping[str, Tensor]
    """State dict of the head's network, in the files' dtype. Embedding and lm_head are the target's if the files have
    none."""
    projection: Projection
    """Projection of the target's hidden states to features, in the files' dtype."""
    undecided: tuple[str, ...] = ()
    """Names of boolean fields of `facts` that the files do not state. `facts` has the likelier value of each; the
    wiring test tries both."""


class HeadReader(Keys):
    """Reader of the files of one head for one target. Its methods raise a `ConfigError` naming what does not fit."""

    def __init__(
        self,
        files: Checkpoint,
        target: TargetFiles,
        names: Sequence[tuple[str, str]] = (),
        *,
        prefix: str = "",
        parts: Sequence[str] = (),
    ) -> None:
        """Read all tensors of the files and rename them as the network's. Raises `ConfigError` for tensors that cannot
        be served: quantised or with numbers that are not finite.

        `names`: pairs of a pattern for the start of a tensor name in the files and its replacement; the first match
        counts. `prefix`: start of the names of the tensors to read, which is cut off first. `parts`: names of
        objects in config.json in which keys are looked up as well.
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
            network_name = _rename(name.removeprefix(prefix), names)
            self.tensors[network_name] = self._read(name, is_map=network_name in MAPS)
        if unused:
            log.info("%s has %d tensors that are not used, such as %s", files.model, len(unused), unused[0])

    def _read(self, name: str, *, is_map: bool) -> Tensor:
        tensor = torch.atleast_1d(self.files.tensor(name))
        if is_map:
            return tensor.flatten()
        if tensor.dtype not in DTYPES:
            raise self.refusal(
                f"is {tensor.dtype}, must be float32, bfloat16 or float16; heads are not served quantised", of=name
            )
        if not bool(tensor.isfinite().all()):
            raise self.refusal("has numbers that are not finite; get the file again or retrain", of=name)
        return tensor

    def layers(self, raw: Any = None, *, has_windows: bool = False) -> PreTrainedConfig:
        """Return the configuration of the head's layers, built by the config class of their model type, since files
        leave out values that are the class's defaults.

        `raw`: the part of config.json that describes the layers. None = the whole config.json or, in speculators'
        layout, the object transformer_layer_config in it. `has_windows`: whether layers may have a sliding window.
        Raises `ConfigError` for layers that cannot be served.
        """
        if raw is None:
            raw = self.config
            if self.files.is_wrapped:
                raw = self.files.part("transformer_layer_config")
        if not raw:
            raise self.refusal("has no transformer_layer_config", of="config.json")
        fields = {"model_type": "llama", **raw, "architectures": None}
        num_tensors = len(self.files.names)
        try:
            config = AutoConfig.for_model(**fields)
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
            for index in range(text.num_hidden_layers):
                window, chunk = layer_limits(text, index)
                if chunk is not None or (window is not None and not has_windows):
                    raise ValueError("heads are not served with layers that have a sliding window")
        except Exception as error:  # transformers' validation has its own kinds, and classes lack what a head needs
            model = self.files.model
            raise ConfigError(f"cannot read config.json of {model}: {first_line(error)}", param="model") from error
        if text.vocab_size < self.target.vocab_size:  # a head may have rows of padding more, which are never kept
            raise self.refusal(
                f"knows {text.vocab_size} ids (vocab_size), and {self.target.model} has {self.target.vocab_size}; give "
                "the target that it was made for",
                param="target_model",
            )
        return text

    def taps(self, keys: Mapping[str, tuple[Any, int]], default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the indices of the hidden states that the head reads, from 0 (embeddings) to the target's number of
        layers.

        `keys`: by key of config.json, its list of layer ids (None if the key is missing) and the offset from such an id
        to the index of the hidden state. `default`: indices to use if no key has a list, as published for the kind.
        Raises `ConfigError` for keys that contradict each other and for indices that the target does not have.

        Example: {"target_layer_ids": ([1, 9], 1)} gives (2, 10), since that key names a layer by its output.
        """
        num_layers = self.target.num_layers
        taps, source = default, None
        for name, (ids, shift) in keys.items():
            if ids is None or ids == []:  # some exporters write an empty list for the default
                continue
            if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                raise self.refusal(f"are {ids!r}, must be a list of whole numbers", of="layer ids")
            found = tuple(i + shift for i in ids)
            if source is not None and found != taps:
                raise self.refusal(
                    f"names different layers: {source} means the hidden states {list(taps)} and {name} means the "
                    f"hidden states {list(found)} (0 = the embeddings); leave one of them"
                )
            taps, source = found, name
        if source is None:
            log.warning(
                "%s does not say which hidden states it reads (%s): taken are %s of its target's 0 to %d, as published",
                *(self.files.model, ", ".join(keys), list(default), num_layers),
            )
        if min(taps) < 0 or max(taps) > num_layers:
            raise self.refusal(
                f"reads the hidden states {list(taps)} of its target, which has {num_layers} layers and hence those "
                f"from 0 to {num_layers}; is it another target's head?",
                param="target_model",
            )
        return taps

    def llama_facts(self, layers: PreTrainedConfig, taps: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields of `LlamaFacts`, by name, for a head with layers of this configuration. `taps`: indices of
        the target's hidden states that the head reads. Raises `ConfigError` for rotary positions or tensor shapes that
        do not fit.
        """
        width, vocab_size = layers.hidden_size, self.target.vocab_size
        self.check_shape("fc.weight", (width, len(taps) * self.target.width))
        rope = dict(layers.rope_parameters or {})
        is_known = rope.get("rope_type", "default") in ("default", *ROPE_INIT_FUNCTIONS)
        if not is_known or rope.get("partial_rotary_factor") not in (None, 1) or "rope_theta" not in rope:
            raise self.refusal(f"are {rope}, which heads are not served with", of="rotary positions")
        num_rows, configured = layers.vocab_size, None
        if self.config.get("draft_vocab_size") is not None:
            num_rows = configured = self.number("draft_vocab_size", min_value=1)
        if "lm_head.weight" in self.tensors:
            num_rows = len(self.tensors["lm_head.weight"])
        if configured not in (None, num_rows):
            raise self.refusal(
                f"has {num_rows} rows, and draft_vocab_size is {configured}; correct its config.json or get the file "
                "again",
                of="lm_head.weight",
            )
        return {
            "layers": llama_layers(layers, width, vocab_size, layers.num_hidden_layers, rope),
            "width": width,
            "vocab_size": vocab_size,
            # padding rows are cut together with the target's
            "draft_vocab_size": vocab_size if num_rows == layers.vocab_size else num_rows,
            "taps": taps,
            "target_width": self.target.width,
        }

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise `ConfigError` unless the tensor `name` exists and has this shape."""
        found = "missing"
        if name in self.tensors:
            found = str(list(self.tensors[name].shape))
        if found != str(list(shape)):
            raise self.refusal(
                f"is {found}, and by its config.json and the target's must be {list(shape)}; give the target that it "
                "was made for, or get the file again",
                of=name,
            )

    def pop(self, name: str, *shape: int) -> Tensor:
        """Remove tensor `name` from `tensors` and return it. Raises `ConfigError` unless it exists in this shape."""
        self.check_shape(name, shape)
        return self.tensors.pop(name)

    def complete(
        self,
        facts: HeadFacts,
        network: type[HeadNetwork],
        projection: Projection,
        undecided: tuple[str, ...] = (),
    ) -> HeadFiles:
        """Return the checked contents of the head's files. Tensors that the files leave out are taken from the target.

        `facts`, `network`: configuration and class of the network. `projection`: the projection of the target's hidden
        states. `undecided`: names of boolean fields of `facts` that the files do not state. Raises `ConfigError` unless
        all tensors fit.
        """
        d2t, t2d = self.tensors.pop("d2t", None), self.tensors.pop("t2d", None)
        ids = target_ids(self.files, d2t, t2d, facts.draft_vocab_size, facts.vocab_size)
        if facts.draft_vocab_size != facts.vocab_size:
            self.tensors["draft_ids"] = ids
        self.fill_from_target(facts)
        self.check_tensors(facts, network)
        return HeadFiles(facts, self.tensors, projection, undecided)

    def fill_from_target(self, facts: HeadFacts) -> None:
        """Add the target's embedding and lm_head to `tensors` where the head has none of its own. Then cut rows off
        the embedding and the lm_head that are beyond the vocabulary sizes in `facts`.

        If config.json sets tie_word_embeddings and the head has an embedding of its own, that embedding is also its
        lm_head. Raises `ConfigError` if the target's tensors are needed and do not have the head's width.
        """
        tensors, target = self.tensors, self.target
        ids = tensors.get("draft_ids")
        if self.config.get("tie_word_embeddings") and "embed_tokens.weight" in tensors:
            tensors.setdefault("lm_head.weight", _rows(tensors["embed_tokens.weight"], ids))
        dtype = next((tensor.dtype for name, tensor in tensors.items() if name.endswith("_proj.weight")), torch.float32)
        for name, lend in (("embed_tokens.weight", target.embedding), ("lm_head.weight", target.lm_head)):
            if name in tensors:
                continue
            if facts.width != target.width:
                raise self.refusal(
                    f"has no {name}, and the target's does not fit: it is {target.width} wide and the head "
                    f"{facts.width}"
                )
            table = lend()
            if name == "lm_head.weight":
                table = _rows(table, ids)
            tensors[name] = table.to(dtype)
        for name, count in PADDED.items():
            num_rows = getattr(facts, count)
            if name in tensors and len(tensors[name]) > num_rows:
                tensors[name] = tensors[name][:num_rows].clone()  # not a view, which would keep the rest in memory

    def check_tensors(self, facts: HeadFacts, network: type[HeadNetwork]) -> None:
        """Raise `ConfigError` unless `tensors` are, by name and shape, exactly those of a `network` with `facts`."""
        try:
            with bounded_build(f"the config.json of {self.files.model}", len(self.files.names)):
                head = network(facts)  # type: ignore[call-arg]  # a subclass takes the facts alone
            head.load_state_dict(self.tensors, assign=True)
        except RuntimeError as error:  # torch names all tensors that are missing, unknown or of another shape
            why = bound_text(" ".join(str(error).split()), MAX_QUOTED)
            raise self.refusal(
                f"does not fit its config.json and the target's: {why}; give the target that it was made for, correct "
                "config.json or get the file again"
            ) from error

    def refuse(self, what: str, names: Iterable[str], *, of: str = "") -> None:
        """Raise a `ConfigError` with the text "has `what`:" and these tensor names. Do nothing if `names` is empty.
        `of`: the tensor or key of config.json at fault, which the message names first.
        """
        found = bound_text(", ".join(sorted(names)), MAX_QUOTED)
        if found:
            raise self.refusal(f"has {what}: {found}; correct its config.json or get the file again", of=of)


def _rename(name: str, names: Sequence[tuple[str, str]]) -> str:
    # midlayer.mlp.up_proj.weight by (r"midlayer\.", "layers.0."): layers.0.mlp.up_proj.weight
    for pattern, replacement in names:
        renamed, num_found = re.subn(f"^{pattern}", replacement, name)
        if num_found:
            return renamed
    return name


def _rows(table: Tensor, ids: Tensor | None) -> Tensor:
    if ids is None:
        return table
    return table.index_select(0, ids)
