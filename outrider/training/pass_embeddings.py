"""Look-ahead embeddings of PaSS in training (Monea et al., 2023, 2311.13581): they alone are trained, read by the
frozen target behind tokens of its own text, as it reads them when it is served.
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
from outrider.engine.loading.lookahead_embeddings import NAME, read_embeddings
from outrider.engine.token_tree import positions
from outrider.training.student import Guess, write_tensors
from outrider.training.teacher import Batch, Seen, Teacher
from outrider.wire.errors import ConfigError

GROUPS = 64
"""Tokens of an answer behind which the embeddings are read, evenly spaced. Doubling it makes an update twice as
telling, and nearly twice as long."""


class _Tree(NamedTuple):
    """A text with the ids behind some of its tokens."""

    num_tokens: int
    parents: Sequence[int]


class Pass:
    """L embeddings, the j-th of which stands for the j-th token to come."""

    ids = None

    def __init__(self, teacher: Teacher, embeddings: Tensor) -> None:
        """embeddings: [L, width] to begin with. Raises ConfigError for a target that reads no token trees."""
        self._teacher = teacher
        self.module = nn.Embedding.from_pretrained(embeddings.to(teacher.device, torch.float32), freeze=False)
        self.depth_trained = self.depth_limit = len(embeddings)
        self._table = teacher.network.get_input_embeddings()
        takes_positions = "position_ids" in inspect.signature(teacher.network.forward).parameters
        config = teacher.network.config.get_text_config(decoder=True)
        self._masks = TreeMasks(config, takes_positions=takes_positions)
        try:
            self._masks.of([_Tree(1, [-1])], 1, 1, torch.float32, torch.device(teacher.device))
        except NotImplementedError as error:
            raise ConfigError(
                f"{teacher.folder} runs no token trees, in which embeddings are read: {error}; train a head or a draft"
            ) from error

    @classmethod
    def new(cls, teacher: Teacher, num: int, seed: int) -> Pass:
        """Return embeddings as far from the mean of the target's as those are from each other."""
        table = teacher.network.get_input_embeddings().weight.detach().float()
        spread = torch.randn(num, table.shape[1], generator=torch.Generator().manual_seed(seed))
        return cls(teacher, table.mean(dim=0).cpu() + spread * table.std(dim=0).cpu())

    @classmethod
    def load(cls, folder: str, teacher: Teacher) -> Pass:
        """Return what `save` wrote. Raises ConfigError."""
        return cls(teacher, read_embeddings(folder, teacher.network.get_input_embeddings().embedding_dim))

    def guesses(self, batch: Batch, seen: Seen, depth: int) -> Iterator[Guess]:
        num_ids, length = self.depth_trained, batch.ids.shape[1]
        behind = _behind(batch)  # [B, G]
        num_groups = behind.shape[1]
        trees = [_Tree(length + num_groups * num_ids, _parents(length, row, num_ids)) for row in behind.tolist()]
        places = torch.from_numpy(np.stack([positions(tree.num_tokens, tree.parents) for tree in trees]))  # [B, Q]
        order = torch.arange(num_ids, device=batch.ids.device)
        own = self.module(order.repeat(num_groups)) * getattr(self._table, "embed_scale", 1.0)  # [G * L, width]
        embedded = torch.cat([self._table(batch.ids), own.expand(len(batch.ids), -1, -1)], dim=1)  # [B, Q, width]
        ahead = behind[:, :, None] + 1 + order  # [B, G, L], the tokens that are stood for; what is said follows them
        asks = (ahead < batch.lengths[:, None, None] - 1) & (order < depth)
        asks[:, 1:] &= (behind[:, 1:] > behind[:, :-1])[:, :, None]  # each token once
        wanted = torch.cat([torch.zeros_like(batch.ids, dtype=torch.bool), asks.flatten(1)], dim=1)  # [B, Q]
        num_queries = embedded.shape[1]
        mask = self._masks.of(trees, num_queries, num_queries, embedded.dtype, embedded.device)
        logits = self._teacher.say(embedded, places.to(embedded.device), mask, wanted)  # [M, V]
        said = ahead + length * torch.arange(len(behind), device=ahead.device)[:, None, None]  # through the rows
        depths = order.expand_as(asks)[asks]  # [M]
        for skipped in range(depth):
            yield Guess(skipped, said[asks][depths == skipped], logits[depths == skipped])

    def save(self, folder: Path) -> None:
        write_tensors(folder, {NAME: self.module.weight.detach().to("cpu", torch.bfloat16)})


def _behind(batch: Batch) -> Tensor:
    """Return the tokens [B, G] int64 behind which the ids are read, from the prompt's last on. Short answers have some
    more than once.
    """
    first = batch.starts - 1
    num = (batch.lengths - 2 - first).clamp(min=1)  # that are followed by a token to stand for, and one to say
    num_groups = min(GROUPS, int(num.max()))
    steps = torch.arange(num_groups, device=batch.ids.device)
    return first[:, None] + steps * num[:, None] // num_groups


def _parents(num_tokens: int, behind: Sequence[int], num_ids: int) -> list[int]:
    """Return whom each token follows, of a text and then of the ids behind some of its tokens."""
    parents = list(range(-1, num_tokens - 1))
    for token in behind:
        parents += [token, *range(len(parents), len(parents) + num_ids - 1)]
    return parents
