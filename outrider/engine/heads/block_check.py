"""Test at load that a head of blocks computes on our cache what it computes without one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.heads.block_path import BlockHeadPath
from outrider.engine.heads.dflash import DFlashHead
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.model_files import first_line
from outrider.engine.loading.packed_linear import pack_linears, unpack_linears
from outrider.engine.loading.self_test import NUM_BLOCKS, TOLERANCE
from outrider.engine.model_runner import ModelFacts, ModelRunner
from outrider.engine.paths.forward_path import PathUnavailable
from outrider.engine.step_plan import Row
from outrider.wire.log import get_logger

log = get_logger(__name__)

LENGTHS = (40, 13, 0)
"""Rows before the blocks that are tried: the longest fed in pieces, the last none."""


def tested_path(head: DFlashHead, facts: ModelFacts) -> BlockHeadPath:
    """Return a tested path, on a CPU with packed weights where they pass, too. Raises PathUnavailable."""
    path = BlockHeadPath(head)
    truth = _truth(head, facts)
    _check(path, facts, truth)
    if head.device.type == "cpu" and pack_linears(head):
        try:
            _check(path, facts, truth)
        except PathUnavailable as reason:
            unpack_linears(head)
            log.warning("%s keeps its plain linear layers: packed, it %s", facts.model_id, reason)
    return path


def _check(path: BlockHeadPath, facts: ModelFacts, truth: Sequence[Tensor]) -> None:
    runner = ModelRunner(path, facts, KVPool(NUM_BLOCKS, path.block_size), path.head.device)
    try:
        found = _on_cache(runner, path.head, facts)
    except Exception as reason:  # whatever a kernel does with a shape that it does not know
        raise PathUnavailable(f"does not run on this cache: {type(reason).__name__}: {first_line(reason)}") from reason
    pairs = zip(found, truth, strict=True)
    error = float(torch.stack([(ours - other).abs().max() / other.abs().max() for ours, other in pairs]).max())
    if not error <= TOLERANCE[facts.dtype]:  # NaN fails
        raise PathUnavailable(
            f"computes other logits with this cache than without one: largest difference {error:.2e} of the largest "
            f"logit, at most {TOLERANCE[facts.dtype]:.0e} is allowed"
        )


def _block(head: DFlashHead, facts: ModelFacts, num_rows: int) -> list[int]:
    size = min(head.facts.block_size, facts.context_limit - num_rows)
    return [num_rows % facts.vocab_size, *[head.facts.mask_id] * (size - 1)]


def _lengths(facts: ModelFacts) -> list[int]:
    return [min(length, facts.context_limit - 5) for length in LENGTHS]


def _features(head: DFlashHead, num_rows: int) -> Tensor:
    """Return rows [num_rows, d] that differ by position and column."""
    columns = torch.arange(head.facts.width)[None] + 1
    return torch.sin(columns * (torch.arange(num_rows)[:, None] + 1)).to(head.device, head.dtype)


@torch.inference_mode()
def _truth(head: DFlashHead, facts: ModelFacts) -> list[Tensor]:
    """Return the logits [B, Vd] of a block behind each number of rows, and of one behind four rows more."""
    found = []
    for length in _lengths(facts):
        for num_rows in (length, length + 4):
            ids = torch.tensor([_block(head, facts, num_rows)], device=head.device)
            logits = head(input_ids=ids, features=_features(head, num_rows)[None]).logits[0]
            found.append(head.mapped(logits.float()))
    return found


def _on_cache(runner: ModelRunner, head: DFlashHead, facts: ModelFacts) -> list[Tensor]:
    """As `_truth`: rows in pieces beside a whole block, blocks of several sequences together, and cut away again."""
    lengths = _lengths(facts)
    tables = [runner.pool.new_table() for _ in lengths]
    num_cached = [0] * len(lengths)

    def row(index: int, end: int, *, asks: bool) -> Row:
        start = num_cached[index]
        block = _block(head, facts, end) if asks else []
        ids = [*[0] * (end - start), *block]
        num_cached[index] = end
        return Row(tables[index], ids, start, len(block), [0] * start, features=_features(head, end)[start:end])

    found: dict[tuple[int, int], Tensor] = {}

    def ask(ends: dict[int, int]) -> None:
        rows = [row(index, end, asks=True) for index, end in ends.items()]
        parts = runner.forward(rows).split([each.num_logits for each in rows])
        for (index, end), logits in zip(ends.items(), parts, strict=True):
            found[index, end - lengths[index]] = head.mapped(logits)
            tables[index].truncate(end)

    runner.forward([row(0, lengths[0] // 2, asks=False)])
    beside = [row(0, lengths[0] - 3, asks=False), row(1, lengths[1], asks=True)]
    found[1, 0] = head.mapped(runner.forward(beside))
    tables[1].truncate(lengths[1])
    ask({0: lengths[0], 2: lengths[2]})
    ask({index: length + 4 for index, length in enumerate(lengths)})
    for table in tables:
        table.free()
    return [found[key] for key in sorted(found)]
