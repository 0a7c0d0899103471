"""What the networks of all heads with a cache have in common: they are small transformers models of their own, so that
PagedPath runs them with block tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

H = TypeVar("H", bound="HeadNetwork")

Shape = tuple[int, int]
"""(heads, numbers a head) of what a layer caches of a token."""
Misreading = tuple[str, AbstractContextManager[None]]
"""A way in which files are misread, by what it would be, and the context in which the head is wired so."""


class HeadNetwork(PreTrainedModel):
    """Made of a head's facts, over the tensors of its files."""

    _supports_attention_backend = True
    _supports_sdpa = True
    facts: Any
    """Of its kind."""
    norm: nn.Module
    """The final norm."""
    lm_head: nn.Linear
    draft_ids: Tensor | None
    """[Vd] int64, the target ids of lm_head's rows; None where they are all ids."""

    @property
    def kv_shapes(self) -> Sequence[tuple[Shape, Shape]]:
        """Shapes of the keys and values that each layer caches of a token."""
        raise NotImplementedError

    @classmethod
    def of(cls: type[H], facts: Any, tensors: Mapping[str, Tensor]) -> H:
        """Return a head over these tensors, named as `state_dict` does, in eval mode; nothing is copied.

        Raises RuntimeError for tensors that are missing, unknown or of another shape.
        """
        with torch.device("meta"):
            head = cls(facts)
        head.load_state_dict(dict(tensors), assign=True)
        head.make_rotary(tensors["lm_head.weight"].device)
        return head.eval().requires_grad_(False)

    def make_rotary(self, device: torch.device) -> None:
        """Make the rotary frequencies, which are no tensors of the files."""
        raise NotImplementedError

    def misreadings(self) -> Sequence[Misreading]:
        """Return the ways in which files of this kind are misread, beside taps of other layers."""
        return ()

    def mapped(self, logits: Tensor) -> Tensor:
        """Return the columns [..., Vd] that the head has rows for: beside UNMAPPED no difference would be seen."""
        return logits if self.draft_ids is None else logits.index_select(-1, self.draft_ids)


class LlamaHead(HeadNetwork):
    """A head whose layers have Llama's shapes and rotary positions."""

    config_class = LlamaConfig
    config: LlamaConfig

    @property
    def kv_shapes(self) -> Sequence[tuple[Shape, Shape]]:
        shape = (self.facts.num_kv_heads, self.facts.head_dim)
        return [(shape, shape)] * self.facts.num_layers

    def make_rotary(self, device: torch.device) -> None:
        self.rotary_emb = LlamaRotaryEmbedding(self.config).to(device)


def llama_config(facts: Any) -> LlamaConfig:
    """Return the configuration that transformers' modules and our cache read, of the facts of a LlamaHead."""
    return LlamaConfig(
        vocab_size=facts.vocab_size,
        hidden_size=facts.width,
        intermediate_size=facts.ffn_width,
        num_hidden_layers=facts.num_layers,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        max_position_embeddings=facts.trained_context,
        rms_norm_eps=facts.epsilon,
        rope_parameters=dict(facts.rope),
    )
