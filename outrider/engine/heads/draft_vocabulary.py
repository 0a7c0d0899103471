"""Find the target's token id for each row of a head's lm_head. Used by the readers of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.heads.checkpoint import Checkpoint


def target_ids(files: Checkpoint, d2t: Tensor | None, t2d: Tensor | None, num_rows: int, vocab_size: int) -> Tensor:
    """Return the target's token ids [Vd] int64, one for each row of a head's lm_head, from the tensors d2t and t2d of
    its files.

    d2t holds offsets: row i stands for the id i + d2t[i]. t2d is a mask over the target's ids. A head with `vocab_size`
    rows needs neither of them. `files`: the head's checkpoint, for messages. `num_rows`: Vd.

    Raises `ConfigError` if a head with fewer rows has neither tensor, or if the tensors contradict each other or do not
    fit.

    Example: d2t [0, 0, 3] gives the ids [0, 1, 5]; the same head's t2d is true at 0, 1 and 5.
    """
    maps = dict[str, Tensor]()
    if num_rows == vocab_size:
        maps["its lm_head"] = torch.arange(vocab_size)
    if d2t is not None:
        maps["d2t"] = torch.arange(len(d2t)) + d2t.to(torch.int64)
    if t2d is not None:
        maps["t2d"] = t2d.to(torch.bool).nonzero().flatten()
    if not maps:
        raise files.refusal(
            f"has {num_rows} rows for a vocabulary of {vocab_size}, and neither d2t nor t2d says which; correct "
            "draft_vocab_size of its config.json, or get the file again"
        )
    first, ids = next(iter(maps.items()))
    for name, found in maps.items():
        if num_rows == vocab_size:
            found = found[:num_rows]  # without padding ids
        if len(found) != num_rows:
            raise files.refusal(
                f"keeps {len(found)} ids, and there are {num_rows} rows of its lm_head; correct draft_vocab_size of "
                "its config.json, or get the file again",
                of=name,
            )
        check_ids(files, name, found, vocab_size)
        if not torch.equal(found, ids):
            raise files.refusal(
                f"has a {name} that disagrees with {first}: d2t must hold offsets, so that row i is the id i + d2t[i], "
                "in the order of t2d's ids"
            )
    return ids


def check_ids(files: Checkpoint, name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise `ConfigError` if ids [Vd] of the tensor `name` repeat or are not in the target's vocabulary."""
    numbers, counts = ids.unique(return_counts=True)
    wrong = numbers[(numbers < 0) | (numbers >= vocab_size) | (counts > 1)].tolist()
    if wrong:
        raise files.refusal(
            f"leads to the id {wrong[0]}, an id twice or not of the target's, which end at {vocab_size - 1}; give the "
            "target that it was made for, or get the file again",
            of=name,
        )
