"""What the networks of all heads with a cache have in common: they are small transformers models of their own, so that
PagedPath runs them with block tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.engine.heads.opening import OpeningMap

H = TypeVar("H", bound="HeadNetwork")

Shape = tuple[int, int]
"""(heads, numbers a head) of what a layer caches of a token."""
Misreading = tuple[str, AbstractContextManager[None]]
"""A way in which files are misread, by what it would be, and the context in which the head is wired so."""


class HeadFacts(Protocol):
    """Facts of a head, whatever layout its files have. A dataclass, of which `dataclasses.replace` makes another."""

    @property
    def width(self) -> int:
        """d, of its features and its hidden states."""

    @property
    def vocab_size(self) -> int:
        """V, of the target."""

    @property
    def draft_vocab_size(self) -> int:
        """Vd, rows of the head's lm_head."""


@dataclass(frozen=True, slots=True)
class MaskEntry:
    """What stands at positions that a head fills in one go (P-EAGLE)."""

    token_id: int
    feature: Tensor
    """[d]."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as its files say it."""

    facts: Any
    """Of the head's kind."""
    tensors: Mapping[str, Tensor]
    """For the `of` of its class, in the files' dtype; embedding and lm_head may be the target's."""
    opening: OpeningMap
    """For the target, in the files' dtype."""
    undecided: tuple[str, ...] = ()
    """Fields of `facts`, each true or false, that the files leave open: the value there is the likelier one."""
    mask: MaskEntry | None = None
    """Of a head that fills masked positions in place of going on from its carries."""


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

    def decide(self, facts: Any) -> None:
        """Go on with other facts, of which none changes a tensor."""
        self.facts = facts

    @contextmanager
    def decided(self, facts: Any) -> Iterator[None]:
        """Go on with other facts for a while."""
        before = self.facts
        self.decide(facts)
        try:
            yield
        finally:
            self.decide(before)

    def misreadings(self) -> Sequence[Misreading]:
        """Return the ways in which files of this kind are misread, beside taps of other layers."""
        return ()

    def mapped(self, logits: Tensor) -> Tensor:
        """Return the columns [..., Vd] that the head has rows for: beside UNMAPPED no difference would be seen."""
        return logits if self.draft_ids is None else logits.index_select(-1, self.draft_ids)


@contextmanager
def swapped(module: Any, one: str, other: str) -> Iterator[None]:
    """Have two of a module's parts in each other's place."""

    def swap() -> None:
        first, second = getattr(module, one), getattr(module, other)
        setattr(module, one, second)
        setattr(module, other, first)

    swap()
    try:
        yield
    finally:
        swap()


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFacts:
    """Facts of a LlamaHead behind an opening map, whatever layout its files have."""

    width: int
    """d, of the head's hidden states and its features."""
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    """Of every norm, the opening map's too."""
    rope: Mapping[str, Any]
    """transformers' rope_parameters."""
    vocab_size: int
    """V, of the target."""
    draft_vocab_size: int
    """Vd, rows of the head's lm_head."""
    taps: tuple[int, ...]
    """Hidden states of the target that the opening map reads, as `OpeningSpec.taps`."""
    target_width: int
    """Of the target's hidden states."""
    trained_context: int = 2048
    """Tokens of the context in training, which some kinds of rotary scaling count from. No limit."""


def shape_of(layers: Any) -> dict[str, Any]:
    """Return the facts of LlamaFacts that the configuration of a model's layers says, but for the rotary positions.

    Raises AttributeError for layers that are not shaped like Llama's.
    """
    return {
        "ffn_width": layers.intermediate_size,
        "num_heads": layers.num_attention_heads,
        "num_kv_heads": layers.num_key_value_heads,
        "head_dim": getattr(layers, "head_dim", None) or layers.hidden_size // layers.num_attention_heads,
        "epsilon": layers.rms_norm_eps,
        "trained_context": layers.max_position_embeddings,
    }


class LlamaHead(HeadNetwork):
    """A head whose layers have Llama's shapes and rotary positions."""

    config_class = LlamaConfig
    config: LlamaConfig

    def __init__(self, facts: Any) -> None:
        """Make what comes before the layers. facts: a LlamaFacts that has num_layers."""
        super().__init__(
            LlamaConfig(
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
        )
        self.facts = facts
        self.embed_tokens = nn.Embedding(facts.vocab_size, facts.width)
        is_reduced = facts.draft_vocab_size != facts.vocab_size
        self.register_buffer("draft_ids", torch.arange(facts.draft_vocab_size) if is_reduced else None)
        self.make_rotary(self.embed_tokens.weight.device)

    @property
    def kv_shapes(self) -> Sequence[tuple[Shape, Shape]]:
        shape = (self.facts.num_kv_heads, self.facts.head_dim)
        return [(shape, shape)] * self.facts.num_layers

    def make_rotary(self, device: torch.device) -> None:
        self.rotary_emb = LlamaRotaryEmbedding(self.config).to(device)
