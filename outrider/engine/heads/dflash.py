"""DFlash (2602.06036) and DSpark as a small transformers model: one forward fills a block of positions.

An entry of the head's cache is made from a feature, at the position of the feature's token. The forward appends a block
to them: the anchor, which is the last committed token, and mask tokens. All layers read the same features. DSpark adds
a sequential head: a bias on the logits of a position that depends on the token before it.

Files have the layouts of z-lab, SpecForge, speculators and DeepSpec. The layouts differ in where a key stands, in what
a layer id means and in whether the files have an embedding and an lm_head of the head's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from outrider.engine.attention.block_cache import layer_limits
from outrider.engine.attention.forward_path import NORMED
from outrider.engine.files.model_files import model_file
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.head_files import HeadFiles, HeadReader
from outrider.engine.heads.llama_head import LlamaFacts, LlamaHead
from outrider.engine.heads.network import BlockHead, BlockShape, HeadFacts
from outrider.engine.heads.projection import Projection, ProjectionSpec
from outrider.wire.requests.params import MAX_DRAFT_TOKENS

MarkovKind = Literal["vanilla", "gated", "rnn"]
"""Kind of DSpark's sequential head, which biases a position's logits. vanilla: by the previous token alone; gated: by
its embedding, scaled by the position's hidden state; rnn: by a recurrent state, carried along the block."""
NAMES = ((r"encoder\.fc\.", "fc."), (r"encoder\.output_norm_enc\.", "hidden_norm."))
RANK = ("markov_rank", "dspark_markov_rank")
MAX_RANK = 1 << 16
"""Largest `markov_rank` accepted in a config.json: far above the hidden size of any published model."""
UNSERVED = {
    "attention_sink_bias": "attention sinks",
    "use_swa": "windows that layer_types do not name",
    "final_logit_softcapping": "soft caps",
    "input_embedding_scale": "scaled embeddings",
    "output_multiplier": "scaled logits",
}
"""Keys of config.json that switch on computations that this code does not have, each with the computation's name for
errors. A head is refused if one of these keys is set. 0, false and null count as not set, and so does the number 1, a
factor without effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(LlamaFacts):
    """Configuration of a DFlash or DSpark head."""

    is_carry_normed: bool = True
    windows: tuple[int | None, ...]
    """For each layer of the head, the maximum number of keys that a query attends to, its own included; None = no
    maximum."""
    causal: tuple[bool, ...]
    """For each layer of the head, whether a token of the block attends only to the block's tokens before it and to
    itself. False = all tokens of the block attend to each other."""
    block: BlockShape
    embedding_scale: float = 1.0
    """Factor by which the head multiplies the embeddings of a block's tokens."""
    markov_rank: int = 0
    """Rank of DSpark's sequential head, r in its shapes; 0 = the head has none."""
    markov_kind: MarkovKind = "vanilla"


class DFlashHead(LlamaHead, BlockHead):
    """Network of a DFlash or DSpark head, without the projection of the target's hidden states."""

    facts: DFlashConfig

    def __init__(self, facts: DFlashConfig) -> None:
        super().__init__(facts)
        self.layers = nn.ModuleList()
        for index, window in enumerate(facts.windows):
            layer = Qwen3DecoderLayer(self.config, index)
            layer.self_attn.sliding_window = window
            self.layers.append(layer)
        self.markov_head: MarkovHead | None = None
        if facts.markov_rank:
            self.markov_head = MarkovHead(facts)

    @property
    def block(self) -> BlockShape:
        return self.facts.block

    def misreadings(self) -> Sequence[tuple[str, HeadFacts]]:
        facts, block = self.facts, self.block
        place = "earlier"
        size = block.size - 1
        if block.from_anchor:
            place = "later"
            size = block.size + 1
        off_by_one = BlockShape(size, block.mask_id, not block.from_anchor)  # proposes as many tokens
        ways = [(f"reading one place {place}", replace(facts, block=off_by_one))]
        if facts.embedding_scale != 1:
            ways.append(("with unscaled embeddings", replace(facts, embedding_scale=1.0)))
        return ways

    def fill(self, input_ids: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        hidden = self.embed_tokens(input_ids) * self.facts.embedding_scale  # [1, T, d]
        rotary = self.rotary_emb(hidden, position_ids)
        num_read, mask = cache.get_seq_length(), None
        for layer, is_causal in zip(self.layers, self.facts.causal, strict=True):
            if isinstance(cache, DynamicCache):  # our own cache needs no mask
                mask = visible(hidden, num_read, layer.self_attn.sliding_window, is_causal=is_causal)
            hidden = layer(hidden, mask, past_key_values=cache, position_embeddings=rotary, is_causal=is_causal)
        return hidden

    def biased(self, logits: Tensor, hidden: Tensor, token_ids: Sequence[int]) -> Tensor:
        markov = self.markov_head
        if markov is None:
            return logits
        state, latents = markov.begin(), list[Tensor]()
        for token_id, place in zip(torch.tensor(token_ids, device=self.device).split(1), hidden.split(1), strict=True):
            latent, state = markov.step(token_id, place, state)
            latents.append(latent)
        return self.with_biases(logits, markov.markov_w2(torch.cat(latents)))

    def with_biases(self, logits: Tensor, biases: Tensor) -> Tensor:
        """Return logits [N, V] plus the biases [N, Vd] of DSpark's sequential head, in the dtype of the logits. The
        biases are added in the columns of the Vd token ids for which the lm_head has a row.
        """
        if self.draft_ids is None:
            return logits + biases.to(logits.dtype)
        return logits.index_add(-1, self.draft_ids, biases.to(logits.dtype))


def visible(hidden: Tensor, num_read: int, window: int | None, *, is_causal: bool) -> Tensor:
    """Return the attention mask [1, 1, T, num_read + T] of T tokens over `num_read` features and themselves; True =
    attends.

    `hidden`: [1, T, d], used for T and the device. `window`: the maximum number of keys to either side, counting the
    token's own; None = no limit. `is_causal`: whether a token attends only to tokens before it and itself.

    Example: 2 features, 2 tokens, causal: [[1, 1, 1, 0], [1, 1, 1, 1]]; not causal: all 1.
    """
    num_keys = num_read + hidden.shape[1]
    keys = torch.arange(num_keys, device=hidden.device)
    sees = (keys - keys[num_read:, None]).abs() < (window or num_keys)
    if is_causal:
        sees = sees.tril(num_read)
    return sees[None, None]


class MarkovHead(nn.Module):
    """DSpark's sequential head: it computes biases for the logits at a position from the token before the position and,
    in some kinds, from hidden states. Its tensors have the names used by DeepSpec, SpecForge and speculators.
    """

    def __init__(self, facts: DFlashConfig) -> None:
        super().__init__()
        rank, self.kind = facts.markov_rank, facts.markov_kind
        self.markov_w1 = nn.Embedding(facts.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, facts.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(facts.width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + facts.width, 3 * rank)

    def begin(self) -> Tensor:
        """Return the sequential head's state [1, r] (r: `markov_rank`) before a block's first position: zeros."""
        return torch.zeros_like(self.markov_w1.weight[:1])

    def step(self, token_ids: Tensor, hidden: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Advance the sequential head of N blocks by one position. Return the latents, from which the linear layer
        `markov_w2` computes the biases of the logits, and the new recurrent states, each [N, r] with r = `markov_rank`.

        `token_ids` [N] int64: for each block the token before the position. `hidden` [N, d]: the head's hidden states
        at the position. `states` [N, r]: the recurrent states before it.
        """
        embedded = self.markov_w1(token_ids)  # [N, r]
        if self.kind == "vanilla":
            return embedded, states
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, states
        gate, candidate, latent = self.joint_proj(torch.cat([states, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(latent), gate * states + (1 - gate) * torch.tanh(candidate)


def read_dflash(files: Checkpoint, target: TargetFiles, *, is_dspark: bool) -> HeadFiles:
    """Read the files of a DFlash or DSpark head for the target. Raises `ConfigError` naming what is missing, unknown or
    does not fit.
    """
    if model_file(files.model, "mask_embedding.pt") is not None:
        raise files.refusal("has a mask_embedding.pt, which heads are not served with")
    reader = HeadReader(files, target, NAMES, parts=("dflash_config", "dspark_config"))
    facts = _facts(reader, is_dspark=is_dspark)
    norm, fc = reader.pop("hidden_norm.weight", facts.width), reader.tensors.pop("fc.weight")
    spec = ProjectionSpec(facts.taps, facts.width, epsilon=facts.layers.rms_norm_eps, norms_output=True)
    projection = Projection(spec, {"fc": fc, "output_norm": norm.to(fc.dtype)})
    return reader.complete(facts, DFlashHead, projection)


def _facts(reader: HeadReader, *, is_dspark: bool) -> DFlashConfig:
    target = reader.target
    for key, what in UNSERVED.items():
        value = reader.get(key)
        if value and not (type(value) in (int, float) and value == 1):
            raise reader.refusal(f"is {value}, and heads are not served with {what}", of=key)
    layers = reader.layers(has_windows=True)
    num_layers = layers.num_hidden_layers
    num_target_layers = reader.get("num_target_layers")
    if num_target_layers not in (None, target.num_layers):
        raise reader.refusal(
            f"is {num_target_layers}, and {target.model} has {target.num_layers} layers; give the target that it was "
            "made for",
            of="num_target_layers",
            param="target_model",
        )
    markov_rank = 0
    if is_dspark and reader.get(*RANK) is not None:
        markov_rank = reader.number(*RANK, min_value=0, max_value=MAX_RANK)
    markov_kind: MarkovKind = reader.get("markov_head_type") or "vanilla"
    if markov_kind not in get_args(MarkovKind):
        kinds = ", ".join(get_args(MarkovKind))
        raise reader.refusal(f"is {markov_kind!r}, must be one of {kinds}", of="markov_head_type")
    from_anchor = _flag(reader, {"sample_from_anchor": True, "dspark_bonus_anchor": False, "shift_label": True})
    if from_anchor is None:
        from_anchor = is_dspark
    return DFlashConfig(
        **reader.llama_facts(layers, _taps(reader, num_layers, is_dspark=is_dspark)),
        windows=tuple(layer_limits(layers, index)[0] for index in range(num_layers)),
        causal=_causal(reader, layers),
        block=BlockShape(
            reader.number(
                "block_size", "dspark_block_size", min_value=1 if from_anchor else 2, max_value=MAX_DRAFT_TOKENS + 1
            ),
            reader.number("mask_token_id", "dspark_noise_token_id", min_value=0, max_value=target.vocab_size - 1),
            from_anchor,
        ),
        embedding_scale=_embedding_scale(reader),
        markov_rank=markov_rank,
        markov_kind=markov_kind,
    )


def _embedding_scale(reader: HeadReader) -> float:
    if "embed_tokens.weight" in reader.tensors or reader.files.is_wrapped:
        return 1.0
    return reader.target.embedding_scale  # z-lab's heads embed with the target's module


def _taps(reader: HeadReader, num_draft_layers: int, *, is_dspark: bool) -> tuple[int, ...]:
    """Return the hidden states that the head reads.

    Id k means h[k] in speculators' key, and h[k + 1] in all others, which name a layer by its output. Without a key
    they are those that z-lab chooses for a draft with this number of layers.

    Trainers do not agree on the last layer's id. z-lab's code, like NeMo AutoModel's, indexes transformers'
    hidden_states, where the last is normed. DeepSpec, vLLM and SGLang, and so SpecForge and speculators, take it before
    the final norm. Here a DFlash head reads it as in z-lab's code where z-lab's key names it. The wiring test tries the
    other way.
    """
    num_layers = reader.target.num_layers
    default: tuple[int, ...] = (num_layers // 2 + 1,)
    if num_draft_layers > 1:
        apart = (num_layers - 4) / (num_draft_layers - 1)
        default = tuple(round(1 + i * apart) + 1 for i in range(num_draft_layers))
    wrapped_ids = reader.config.get("aux_hidden_state_layer_ids")
    keys = {
        "aux_hidden_state_layer_ids": (wrapped_ids, 0),
        "target_layer_ids": (reader.get("target_layer_ids", "dspark_target_layer_ids"), 1),
    }
    taps = reader.taps(keys, default)
    if is_dspark or wrapped_ids:
        return taps
    return tuple(NORMED if tap == num_layers else tap for tap in taps)


def _causal(reader: HeadReader, layers: PreTrainedConfig) -> tuple[bool, ...]:
    """Return by layer whether attention within the block is causal: layers with a window are, unless a key decides."""
    kinds = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
    is_causal = _flag(reader, {"causal": True, "is_causal": True})
    if is_causal is None and reader.flag("sliding_window_non_causal"):
        is_causal = False
    if is_causal is not None:
        return (is_causal,) * len(kinds)
    return tuple(kind == "sliding_attention" for kind in kinds)


def _flag(reader: HeadReader, keys: Mapping[str, bool]) -> bool | None:
    for key, value in keys.items():
        found = reader.flag(key)
        if found is not None:
            return found is value
    return None
