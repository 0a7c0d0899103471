"""Look-ahead embeddings of PaSS in training (Monea et al., 2023, 2311.13581).

Only the embeddings are trained. The frozen target reads them after tokens of its own text, as it does when it is
served.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from outrider.engine.attention.dense import TreeMasks
from outrider.engine.loading.embedding_files import NAME, read_embeddings
from outrider.engine.token_tree import positions
from outrider.training.student import DraftLogits, write_tensors
from outrider.training.teacher import Batch, TargetOutput, Teacher
from outrider.wire.errors import ConfigError

GROUPS = 64
"""Maximum number of tokens of a text after which a training step feeds a chain of all look-ahead embeddings. They are
evenly spaced in the output."""


class _Tree(NamedTuple):
    # a text, and the look-ahead ids behind some of its tokens
    num_tokens: int
    parents: Sequence[int]


class LookaheadEmbeddings:
    """Student that is a set of L look-ahead embeddings (PaSS). In the target's input, the j-th embedding stands for the
    j-th token after the known text. The target's logits at it propose the token after that one.
    """

    ids = None
    """Token ids that the student can propose: None, since the target computes the logits and can propose all."""

    def __init__(self, teacher: Teacher, embeddings: Tensor) -> None:
        """Take the initial embeddings [L, width]. Raises ConfigError for a target that cannot run token trees."""
        self._teacher = teacher
        self.module = nn.Embedding.from_pretrained(embeddings.to(teacher.device, torch.float32), freeze=False)
        self.depth_trained = self.depth_limit = len(embeddings)
        self._table = teacher.network.get_input_embeddings()
        needs_positions = "position_ids" in inspect.signature(teacher.network.forward).parameters
        config = teacher.network.config.get_text_config(decoder=True)
        self._masks = TreeMasks(config, needs_positions=needs_positions)
        try:
            self._masks.of([_Tree(1, [-1])], 1, 1, torch.float32, torch.device(teacher.device))
        except NotImplementedError as error:
            raise ConfigError(
                f"{teacher.folder} runs no token trees, in which embeddings are read: {error}; train a head or a draft"
            ) from error

    @classmethod
    def new(cls, teacher: Teacher, num: int, seed: int) -> LookaheadEmbeddings:
        """Return a student with `num` random embeddings, distributed like those of the target's vocabulary."""
        table = teacher.network.get_input_embeddings().weight.detach().float()  # [V, width] float32
        spread = torch.randn(num, table.shape[1], generator=torch.Generator().manual_seed(seed))  # [L, width]
        return cls(teacher, table.mean(dim=0).cpu() + spread * table.std(dim=0).cpu())

    @classmethod
    def load(cls, folder: str, teacher: Teacher) -> LookaheadEmbeddings:
        """Load the embeddings that `save` wrote to `folder`. Raises ConfigError for embeddings of another width."""
        return cls(teacher, read_embeddings(folder, teacher.network.get_input_embeddings().embedding_dim))

    def draft_logits(self, batch: Batch, target_output: TargetOutput, depth: int) -> Iterator[DraftLogits]:
        """Yield the target's logits at the look-ahead embeddings 0, 1, ... `depth` - 1, which predict the draft tokens
        at these depths.

        A single forward over a token tree computes them. The tree has the whole text and, after up to GROUPS of its
        tokens, a chain of all embeddings. batch: the texts. target_output: not used.
        """
        num_ids, length = self.depth_trained, batch.ids.shape[1]
        roots = _choose_roots(batch)  # [B, G] int64
        num_groups = roots.shape[1]
        trees = [_Tree(length + num_groups * num_ids, _tree_parents(length, row, num_ids)) for row in roots.tolist()]
        tree_positions = np.stack([positions(tree.num_tokens, tree.parents) for tree in trees])  # [B, Q] int64
        order = torch.arange(num_ids, device=batch.ids.device)  # [L]
        lookahead = self.module(order.repeat(num_groups)) * getattr(self._table, "embed_scale", 1.0)  # [G * L, width]
        embedded = torch.cat([self._table(batch.ids), lookahead.expand(len(batch.ids), -1, -1)], dim=1)  # [B, Q, width]
        tokens = roots[:, :, None] + 1 + order  # [B, G, L] int64, the token that each id stands for
        is_trained = (tokens < batch.lengths[:, None, None] - 1) & (order < depth)  # [B, G, L] bool
        is_trained[:, 1:] &= (roots[:, 1:] > roots[:, :-1])[:, :, None]  # a root that stands twice counts once
        mask = torch.cat([torch.zeros_like(batch.ids, dtype=torch.bool), is_trained.flatten(1)], dim=1)  # [B, Q] bool
        num_queries = embedded.shape[1]
        attention_mask = self._masks.of(trees, num_queries, num_queries, embedded.dtype, embedded.device)
        query_positions = torch.from_numpy(tree_positions).to(embedded.device)
        logits = self._teacher.logits_of(embedded, query_positions, attention_mask, mask)  # [M, V] float32
        token_indices = tokens + length * torch.arange(len(roots), device=tokens.device)[:, None, None]  # [B, G, L]
        depths = order.expand_as(is_trained)[is_trained]  # [M] int64
        for skipped in range(depth):
            yield DraftLogits(skipped, token_indices[is_trained][depths == skipped], logits[depths == skipped])

    def save(self, folder: Path) -> None:
        """Write the embeddings in bfloat16 to model.safetensors in `folder`, from which the drafter `pass`
        loads them.
        """
        write_tensors(folder, {NAME: self.module.weight.detach().to("cpu", torch.bfloat16)})


def _choose_roots(batch: Batch) -> Tensor:
    # [B, G] int64: tokens behind which the ids are read, from the prompt's last on; short outputs have some twice
    first = batch.starts - 1  # [B]
    num_roots = (batch.lengths - 2 - first).clamp(min=1)  # [B]: behind a root there are two tokens or more
    num_groups = min(GROUPS, int(num_roots.max()))
    steps = torch.arange(num_groups, device=batch.ids.device)  # [G]
    return first[:, None] + steps * num_roots[:, None] // num_groups


def _tree_parents(num_tokens: int, roots: Sequence[int], num_ids: int) -> list[int]:
    # 3 tokens, roots [1, 2], 2 ids: [-1, 0, 1, 1, 3, 2, 5]: a chain of two ids behind token 1, and one behind token 2
    parents = list(range(-1, num_tokens - 1))
    for root in roots:
        parents += [root, *range(len(parents), len(parents) + num_ids - 1)]
    return parents
