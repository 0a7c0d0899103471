"""Base classes of the networks of all heads.

A head with a cache is a small transformers model of its own, so that `HeadPath` can run it with block tables. The
feature of a token is made from the target's hidden states of the token by the head's `Projection`. A `CarryHead` joins
a token with the feature of the token before it, and passes its output on as the feature of the next token. A
`BlockHead` caches the features themselves, and fills a block of positions after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from outrider.engine.host_copy import to_device
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row

H = TypeVar("H", bound="HeadNetwork")

RMS_NORMS = (LlamaRMSNorm, Qwen3RMSNorm)
"""Classes of transformers that compute in six operations what torch.nn.RMSNorm computes in one. `HeadNetwork.of`
replaces their modules by torch.nn.RMSNorm."""
MASKED_POSITIONS = 8
"""Number of tokens of a block, the anchor included, for PARD and P-EAGLE drafters whose files do not state it. Released
PARD drafters were trained with this number."""
UNMAPPED = -1e9
"""Logit that stands for a token id for which the head's lm_head has no row. Its probability after softmax is 0. The
number is finite, so that a check of logits for infinities reports only true faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """Configuration of a head's network, whatever the layout of its files. Each kind of head has a subclass."""

    width: int
    """d, width of the head's features and hidden states."""
    vocab_size: int
    """V, the target's vocabulary size."""
    draft_vocab_size: int
    """Vd, number of rows of the lm_head; less than V in a head that can draft only some of the token ids."""
    is_lm_head_normed: bool = True
    """Whether the lm_head reads the last layer's output after the final norm (True) or before it (False)."""
    is_carry_normed: bool = False
    """Whether `HeadOutput.hidden` has the head's hidden states after the final norm (True) or before it (False)."""


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Output of a head's forward at the N requested positions."""

    logits: Tensor
    """Logits [1, N, V] float32; `UNMAPPED` (-1e9) for token ids for which the lm_head has no row."""
    hidden: Tensor
    """Hidden states [1, N, d] in the head's dtype. In a `CarryHead` they are the features of the next tokens. In a
    DSpark head the biases of the logits are computed from them."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Layout of a block, which a block head or a PARD drafter fills in one forward: the last committed token (the
    anchor), then mask tokens.
    """

    size: int
    """Number of tokens of a block, including the anchor."""
    mask_id: int
    from_anchor: bool = True
    """True = the logits at a position predict the next token: those of the anchor the first draft token, those of the
    last mask the last one. False = the logits at a mask predict the token at the mask's own position, and the anchor's
    logits are not used."""
    feature: Tensor | None = None
    """[d], the feature of each mask token; None = mask tokens have no features."""

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens that one block gives: its size, or one less if the anchor's logits are not used."""
        if self.from_anchor:
            return self.size
        return self.size - 1

    def token_ids(self, anchor: int, max_tokens: int) -> list[int]:
        """Return the token ids of a block with this anchor, cut to `max_tokens`, which must be at least 1.

        Example: size 4 and mask id 9 give [anchor, 9, 9, 9]; with `max_tokens` 2, [anchor, 9].
        """
        return [anchor, *[self.mask_id] * (min(self.size, max_tokens) - 1)]


class HeadNetwork(PreTrainedModel):
    """Base class of the networks of heads, built from the configuration and the tensors in a head's files."""

    _supports_attention_backend = True
    _supports_sdpa = True
    lag: ClassVar[int] = 1
    """Distance, in positions, from a token back to the feature from which its KV cache entry is computed: 1 (the token
    before) in a `CarryHead`, 0 (its own feature) in a `BlockHead`."""
    facts: Any
    """Configuration of the network (a subclass of `HeadFacts`). It may be replaced by another one that fits the same
    tensors; the next forward then uses it."""
    norm: nn.Module
    """The final norm, after the last layer."""
    lm_head: nn.Linear
    draft_ids: Tensor | None
    """[Vd] int64, the target's token id for each row of the lm_head; None if there is a row for every id."""

    def __init__(self, config: PreTrainedConfig, facts: Any) -> None:
        super().__init__(config)
        self.facts = facts
        draft_ids = None
        if facts.draft_vocab_size != facts.vocab_size:
            draft_ids = torch.arange(facts.draft_vocab_size)
        self.register_buffer("draft_ids", draft_ids)

    @classmethod
    def of(cls: type[H], facts: Any, tensors: Mapping[str, Tensor]) -> H:
        """Return a network with these facts and tensors, in eval mode. `tensors`: a state dict. The network uses its
        tensors themselves, not copies.

        Raises RuntimeError for tensors that are missing, unknown or of another shape.
        """
        with torch.device("meta"):
            head = cls(facts)  # type: ignore[call-arg]  # a subclass takes the facts alone
            for name, module in list(head.named_modules()):
                if isinstance(module, RMS_NORMS):
                    head.set_submodule(name, nn.RMSNorm(module.weight.shape, module.variance_epsilon))
        head.load_state_dict(dict(tensors), assign=True)
        device = next(iter(tensors.values())).device
        for name, module in list(head.named_modules()):
            if name.endswith("rotary_emb"):  # its frequencies are not in the files
                head.set_submodule(name, type(module)(head.config).to(device))
        return head.eval().requires_grad_(False)

    @property
    def block(self) -> BlockShape | None:
        """Layout of the blocks that the head fills; None for a head that drafts one token after the other."""
        return None

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> HeadOutput:
        """Run the head over T tokens, `input_ids` [1, T] int64, and C features, `features` [1, C, d].

        In a `CarryHead` each token has a feature (C = T). In a `BlockHead` the features are those of C tokens before
        the T tokens of its blocks, and C or T may be 0. `position_ids`: [1, T]; in a `BlockHead` [1, C + T], first the
        positions of the features; None = 0, 1, 2 and so on. `past_key_values`: the head's KV cache; None = nothing is
        cached. `use_cache`: not used. `logits_to_keep`: indices [N] int64 of the tokens whose output is returned, or
        the number of last tokens; 0 = all.
        """
        if position_ids is None:
            num_positions = input_ids.shape[1]
            if not self.lag:
                num_positions += features.shape[1]
            position_ids = torch.arange(num_positions, device=input_ids.device)[None]
        hidden = self.run(input_ids, features, position_ids, past_key_values)  # [1, T, d]
        if isinstance(logits_to_keep, int):
            hidden = hidden[:, -logits_to_keep:]  # [1, N, d]
        else:
            hidden = hidden[:, logits_to_keep]
        normed = self.norm(hidden)
        logits = self.lm_head(normed if self.facts.is_lm_head_normed else hidden)  # [1, N, Vd]
        return HeadOutput(self.spread(logits), normed if self.facts.is_carry_normed else hidden)

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        """Return the last layer's output [1, T, d], before the final norm, for T tokens, `input_ids` [1, T], and C
        features, `features` [1, C, d]; C = T in a `CarryHead`. `position_ids`: [1, T]; in a `BlockHead` [1, C + T],
        first the positions of the features. `cache`: the head's KV cache; None = nothing is cached.
        """
        raise NotImplementedError

    def score_text(
        self, runner: ModelRunner | None, token_ids: Sequence[int], features: Tensor, ahead: int = 1
    ) -> Tensor:
        """Return the logits [P, V] that predict P tokens of a text, each from the tokens before it (teacher forcing).

        The first row predicts the text's third token, the next row the fourth, and so on. `features`: [T, d], one for
        each of the T tokens.

        `ahead`: 1 = the logits of the first draft step; 2 = the logits of the second draft step, which only a
        `CarryHead` has. In the second step the head reads its own output or, in P-EAGLE, a mask; the first row then
        predicts the text's fourth token.

        `runner`: runner of the head; None for a head without a cache. A `CarryHead` takes cache blocks while it runs,
        and raises `OutOfBlocks` if too few are free.
        """
        raise NotImplementedError

    def misreadings(self) -> Sequence[tuple[str, HeadFacts]]:
        """Return other configurations for the wiring test to try, as pairs (label for messages, configuration). Each is
        another way to read the head's files. Other taps are not among them.
        """
        return ()

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] float32 over the target's vocabulary, from logits [..., Vd] of the lm_head's rows.
        Token ids without a row get `UNMAPPED` (-1e9).
        """
        logits = logits.float()
        if self.draft_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.facts.vocab_size), UNMAPPED)
        return whole.index_copy_(-1, self.draft_ids, logits)

    def mapped(self, logits: Tensor) -> Tensor:
        """Return, from logits [..., V] over the target's vocabulary, the columns [..., Vd] of the token ids for which
        the lm_head has rows. This is the inverse of `spread`.
        """
        if self.draft_ids is None:
            return logits
        return logits.index_select(-1, self.draft_ids)


class CarryHead(HeadNetwork):
    """Base class of heads that read a feature with each token and return the feature of the next token."""

    def score_text(
        self, runner: ModelRunner | None, token_ids: Sequence[int], features: Tensor, ahead: int = 1
    ) -> Tensor:
        assert runner is not None, "it has a cache"
        ids = list(token_ids[1:])
        num = len(ids)
        table = runner.pool.new_table()
        try:
            logits = runner.forward([Row(table, ids, 0, num, (), features=features[:-1])])  # [num, V] float32
            if ahead == 2:
                block = self.block
                next_ids = ids[1:]
                next_features = runner.path.hidden[:-1]  # type: ignore[attr-defined]  # a head's path; [num - 1, d]
                if block is not None:
                    assert block.feature is not None, "its masks have features"
                    next_ids = [block.mask_id] * (num - 1)
                    next_features = block.feature.expand(num - 1, -1)
                # num = 3: [-1, 0, 1, 0, 1]: a chain of three, and a child of each token but the last
                parents = [*range(-1, num - 1), *range(num - 1)]
                logits = runner.forward([Row(table, next_ids, num, num - 1, ids, parents, next_features)])
            return logits
        finally:
            table.free()


class BlockHead(HeadNetwork):
    """Base class of heads that cache features and fill a block of mask tokens after them in one forward. The block's
    own keys and values are not kept in the cache.
    """

    lag = 0
    layers: nn.ModuleList
    """Decoder layers of Qwen 3's class."""
    rotary_emb: nn.Module

    @property
    def block(self) -> BlockShape:
        raise NotImplementedError

    def run(self, input_ids: Tensor, features: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        num_read = features.shape[1]
        if cache is None:
            cache = DynamicCache()
        if num_read:
            self.read(features, position_ids[:, :num_read], cache)
        return self.fill(input_ids, position_ids[:, num_read:], cache)

    def read(self, features: Tensor, position_ids: Tensor, cache: Cache) -> None:
        """Write the keys and values of features [1, C, d] at positions [1, C] into the KV cache of every layer. The
        layers' norms are not applied to the features.
        """
        features = features.to(self.dtype)
        rotary = self.rotary_emb(features, position_ids)
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (1, features.shape[1], -1, attention.head_dim)
            key = attention.k_norm(attention.k_proj(features).view(shape)).transpose(1, 2)  # [1, KV, C, hd]
            value = attention.v_proj(features).view(shape).transpose(1, 2)
            _, key = apply_rotary_pos_emb(key, key, *rotary)
            cache.update(key, value, attention.layer_idx)

    def fill(self, input_ids: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        """Return the last layer's output [1, T, d] for token ids [1, T] of blocks, which attend to cached features."""
        raise NotImplementedError

    def score_text(
        self, runner: ModelRunner | None, token_ids: Sequence[int], features: Tensor, ahead: int = 1
    ) -> Tensor:
        """Return the logits [P, V] that predict P tokens of a text, from its third token on, each from the tokens
        before it.

        The text is filled block by block; the anchor of a block is the last token of the previous block. `features`:
        [T, d], one for each of the T tokens. `runner`, `ahead`: not used.
        """
        block = self.block
        features = to_device(features, self.device)[None]  # [1, T, d]
        first = 0 if block.from_anchor else 1
        logits = list[Tensor]()
        for anchor in range(1, len(token_ids) - 1, block.num_drafts):
            ids = torch.tensor([block.token_ids(token_ids[anchor], block.size)], device=self.device)  # [1, B] int64
            output = self(ids, features[:, :anchor])
            previous_ids = token_ids[anchor:-1][: block.num_drafts]
            scored = slice(first, first + len(previous_ids))
            logits.append(self.biased(output.logits[0, scored], output.hidden[0, scored], previous_ids))
        return torch.cat(logits)

    def biased(self, logits: Tensor, hidden: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Return the logits [N, V] of a block's positions, plus biases that depend on the token before each position.

        Only some heads have such biases, DSpark for example; other heads return `logits` unchanged. `hidden`: hidden
        states [N, d] of the positions. `token_ids`: the token before each position; the first of them is the last
        committed token.
        """
        return logits
