"""Read the maps between a head's reduced vocabulary and the target's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.wire.errors import ConfigError


def target_ids(model: str, tensors: Mapping[str, Tensor], num_rows: int, vocab_size: int) -> Tensor:
    """Return the target ids [Vd] int64 of a head's rows, from its d2t (offsets: row i is id i + d2t[i]) and t2d.

    Raises ConfigError where there is neither, or they disagree or do not fit.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    for name, given in (("d2t", d2t), ("t2d", t2d)):
        if given is not None and given.dim() != 1:
            raise ConfigError(
                f"{name} of {model} is {list(given.shape)}, must be a list; get the file again", param="model"
            )
    if d2t is None and t2d is None:
        raise ConfigError(
            f"{model} has {num_rows} rows for a vocabulary of {vocab_size}, and neither d2t nor t2d says which; "
            "correct draft_vocab_size of its config.json, or get the file again",
            param="model",
        )
    kept = None if t2d is None else t2d.to(torch.bool).nonzero().flatten()
    ids = kept if d2t is None else torch.arange(len(d2t)) + d2t.to(torch.int64)
    assert ids is not None
    if len(ids) != num_rows:
        raise ConfigError(
            f"{'t2d' if d2t is None else 'd2t'} of {model} keeps {len(ids)} ids and its lm_head has {num_rows} rows",
            param="model",
        )
    check_ids(model, "d2t" if d2t is not None else "t2d", ids, vocab_size)
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
