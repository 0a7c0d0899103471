"""A head of blocks over a text that is known: what it says of every token, each in one block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.heads.block_path import BlockHeadPath
from outrider.engine.heads.dflash import DFlashHead
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row


@torch.inference_mode()
def said_of_text(runner: ModelRunner, path: BlockHeadPath, token_ids: Sequence[int], rows: Tensor) -> Tensor:
    """Return the logits [T - 2, V] of the third token and those behind, of rows [T, d]: blocks follow each other, and
    the anchor of each is the last token of the one before.

    path: the runner's. Takes memory of the runner's cache for as long as it runs. Raises OutOfBlocks.
    """
    head, facts = path.head, path.head.facts
    masks = [facts.mask_id] * (facts.block_size - 1)
    table, found = runner.pool.new_table(), list[Tensor]()
    try:
        for anchor in range(1, len(token_ids) - 1, facts.num_drafts):
            start = table.num_tokens
            block = [token_ids[anchor], *masks[: runner.facts.context_limit - anchor - 1]]
            num_said = min(facts.num_drafts, len(token_ids) - 1 - anchor)
            num_logits = len(block) - (not facts.from_anchor)
            ids = [*token_ids[start:anchor], *block]
            row = Row(table, ids, start, num_logits, token_ids[:start], features=rows[start:anchor])
            logits = runner.forward([row])[:num_said]
            table.truncate(anchor)
            found.append(biased(head, logits, path.hidden[:num_said], token_ids[anchor : anchor + num_said]))
    finally:
        table.free()
    return torch.cat(found)


def biased(head: DFlashHead, logits: Tensor, hidden: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Return a block's logits [N, V] as a sequential head leaves them, of hidden states [N, d] and the tokens before
    each place, the anchor first.
    """
    markov = head.markov_head
    if markov is None:
        return logits
    state, latents = markov.begin()[None], list[Tensor]()
    for place, token_id in enumerate(token_ids):
        latent, state = markov.step(torch.tensor([token_id], device=head.device), hidden[place : place + 1], state)
        latents.append(latent)
    return head.with_biases(logits, markov.biases(torch.cat(latents)))
