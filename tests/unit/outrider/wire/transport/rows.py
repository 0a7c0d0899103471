"""Rows of laws, drawn."""

import torch

VOCAB = 50


def laws(num_rows: int, support: int, seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    """([R, VOCAB] float32 log-probs with `support` entries a row, an id with mass in each)."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.full((num_rows, VOCAB), -torch.inf)
    ids = []
    for row in out:
        chosen = torch.randperm(VOCAB, generator=generator)[:support]
        row[chosen] = (3 * torch.randn(support, generator=generator)).log_softmax(0)
        ids.append(int(chosen[0]))
    return out, ids
