"""Medusa's heads (2401.10774) and blockwise heads (1811.03115): a residual network per head, on one hidden state of the
target.

Head i predicts the token 2 + i positions after the token whose hidden state it reads, without the tokens between them.
Tensors have the names of Medusa's repository or of vLLM. Blockwise heads have no lm_head of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.draft_vocabulary import check_ids
from outrider.engine.heads.head_files import HeadFiles, HeadReader
from outrider.engine.heads.network import HeadFacts, HeadNetwork
from outrider.engine.heads.projection import Projection
from outrider.engine.host_copy import to_device
from outrider.engine.model_runner import ModelRunner

PREFIXES = ("medusa_head.", "medusa_heads.", "medusa_lm_head.")
"""Prefixes that some files put before the names of all tensors of the heads. In a file with such a prefix, tensors
without it belong to the base model and are not read."""


NAMES = ((r"(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."), (r"(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"))
"""Pairs of a pattern and a replacement that turn tensor names of Medusa's repository into those of `MedusaHeads`: first
for the residual layers, then for the lm_heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(HeadFacts):
    """Configuration of Medusa or blockwise heads, whatever the layout of their files.

    The heads read the target's hidden states after its final norm, so `width` is the width of these hidden states.
    """

    num_heads: int
    num_layers: int
    """Number of residual layers in each head; 0 = the head's lm_head reads the target's hidden state directly."""
    shares_lm_head: bool
    """Whether all heads of the checkpoint share one lm_head, such as the target's. False = each has its own."""
    has_bias: bool = True
    """Whether the residual layers have a bias."""
    scale: float = 1.0
    """Factor by which the logits of all heads' lm_heads are multiplied."""


class MedusaHeads(HeadNetwork):
    """Network of all Medusa or blockwise heads of a checkpoint. Tensors have vLLM's names: blocks.{head}.layers.{layer}
    and lm_heads.{head}.
    """

    config_class = PreTrainedConfig
    facts: MedusaConfig

    def __init__(self, facts: MedusaConfig) -> None:
        super().__init__(PreTrainedConfig(), facts)
        self.blocks = nn.ModuleList()
        for _ in range(facts.num_heads):
            self.blocks.append(_Block(facts))
        num_lm_heads = 1 if facts.shares_lm_head else facts.num_heads
        self.lm_heads = nn.ModuleList()
        for _ in range(num_lm_heads):
            self.lm_heads.append(nn.Linear(facts.width, facts.draft_vocab_size, bias=False))

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]  # it has no cache
        """Return the logits [..., num_heads, V] float32 for hidden states [..., dt] of any device and dtype."""
        hidden = to_device(hidden, self.device).to(self.dtype)
        inner = torch.stack([block(hidden) for block in self.blocks], dim=-2)  # [..., num_heads, dt]
        if self.facts.shares_lm_head:
            logits = self.lm_heads[0](inner)  # [..., num_heads, Vd]
        else:
            logits = torch.stack([head(inner[..., i, :]) for i, head in enumerate(self.lm_heads)], dim=-2)
        return self.spread(logits * self.facts.scale)

    def score_text(
        self, runner: ModelRunner | None, token_ids: Sequence[int], features: Tensor, ahead: int = 1
    ) -> Tensor:
        """Return the logits [T - 1, V] of the first head along a text of T tokens. The first row predicts the text's
        third token, the last row the token after the text. `features` [T, d]: the target's hidden states of the T
        tokens, after its final norm. The other arguments are not used.
        """
        return self(features[:-1])[:, 0]


class _Block(nn.Module):
    """A head's residual layers, x + SiLU(W x + b)."""

    def __init__(self, facts: MedusaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(facts.num_layers):
            self.layers.append(nn.Linear(facts.width, facts.width, bias=facts.has_bias))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden


def read_medusa(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read the files of Medusa or blockwise heads for the target. Heads and layers are counted by their tensors, since
    many published configs are wrong.

    Raises `ConfigError` naming what is missing, unknown or does not fit.
    """
    reader = HeadReader(files, target, NAMES, prefix=_find_prefix(files.names))
    tensors, vocab_size = reader.tensors, target.vocab_size
    num_heads = _count(tensors, r"(?:blocks|lm_heads)\.(\d+)\.")
    num_layers = _count(tensors, r"blocks\.\d+\.layers\.(\d+)\.")
    if not num_heads:
        raise files.refusal("has no tensors of Medusa heads, such as 0.0.linear.weight")
    token_map = tensors.pop("token_map", None)
    if token_map is not None:
        token_map = tensors["draft_ids"] = token_map.to(torch.int64)
        check_ids(files, "token_map", token_map, vocab_size)
    is_shared = bool(files.config.get("original_lm_head"))
    if "lm_head.weight" in tensors:
        tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
        is_shared = True
    if not any(name.startswith("lm_heads.") for name in tensors):
        tensors["lm_heads.0.weight"] = target.lm_head().to(next(iter(tensors.values())).dtype)
        is_shared = True
    draft_vocab_size = vocab_size
    if token_map is not None:
        draft_vocab_size = len(token_map)
    for name, tensor in tensors.items():
        if not name.startswith("lm_heads."):
            continue
        if token_map is None:
            tensors[name] = tensor[:vocab_size]  # without padding rows
        elif len(tensor) >= max(vocab_size, draft_vocab_size + 1):
            tensors[name] = tensor.index_select(0, token_map)
    facts = MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        width=target.width,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        shares_lm_head=is_shared,
        has_bias="blocks.0.layers.0.bias" in tensors,
        scale=float(files.config.get("logit_scale", 1.0)),
    )
    reader.check_tensors(facts, MedusaHeads)
    return HeadFiles(facts, tensors, Projection.identity(target.width))


def _find_prefix(names: Iterable[str]) -> str:
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in names):
            return prefix
    return ""


def _count(names: Iterable[str], pattern: str) -> int:
    """Return one more than the highest index that a pattern finds in names."""
    found = 0
    for name in names:
        match = re.match(pattern, name)
        if match is not None:
            found = max(found, int(match[1]) + 1)
    return found
