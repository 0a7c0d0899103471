"""Messages of rank 0 to the other ranks: the next call of the attention path and its arguments, encoded as integers.

Used by `team` on rank 0 and by `loading.rank_process`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.engine.step_plan import Row

_KIND = struct.Struct("<16s")  # the kind's name; integers of 64 bits follow

FORWARD = "forward"
"""Kind of a message that calls `ForwardPath.forward`."""
COPY = "copy_blocks"
"""Kind of a message that calls `ForwardPath.copy_blocks`."""
MOVE = "move_tokens"
"""Kind of a message that calls `TreePath.move_tokens`."""
STORAGE = "set_storage"
"""Kind of a message that calls `ForwardPath.set_storage`."""
END = "end"
"""Kind of a message that tells a rank above 0 to end without an error."""


@dataclass(frozen=True, slots=True)
class RemoteTable:
    """Copy, in another rank's process, of a block table of rank 0, with the fields that an attention path reads."""

    blocks: list[int]
    """Block numbers of the sequence, in order."""
    block_size: int
    """Number of tokens in a block."""


def encode_forward(rows: Sequence[Row], *, with_past: bool) -> bytes:
    """Return the message that calls a forward over these rows.

    with_past: whether a row with fewer new tokens than the row with the most also sends its last cached token ids, up
    to that number. The `dense` path needs them: it aligns rows at their ends, and fills shorter ones by feeding cached
    tokens again.
    """
    max_new = max((row.num_new for row in rows), default=0)
    block_size = 1
    if rows:
        block_size = rows[0].table.block_size
    numbers: list[int] = [len(rows), block_size]
    for row in rows:
        past: list[int] = []
        if with_past:
            past = row.last_ids(min(max_new, row.num_tokens))[: -row.num_new]
        parents = row.parents or ()
        numbers += (row.num_new, row.num_cached, row.num_logits, len(row.table.blocks), len(past), len(parents))
        numbers += row.new_ids
        numbers += row.table.blocks
        numbers += past
        numbers += parents
    return encode(FORWARD, numbers)


def encode(kind: str, numbers: Sequence[int] = ()) -> bytes:
    """Return the message of a kind other than FORWARD.

    numbers: for COPY the blocks of each copy, [from, to, from, to, ..]; for MOVE the storage indices from which tokens
    are copied, and then those to which they are; for STORAGE the number of blocks and the block size; for END nothing.
    """
    return _KIND.pack(kind.encode()) + np.array(numbers, dtype="<i8").tobytes()


def decode(message: bytes) -> tuple[str, tuple[Any, ...]]:
    """Return the kind of a message, and the arguments for the method that a message of this kind calls."""
    kind = _KIND.unpack_from(message)[0].rstrip(b"\0").decode()
    numbers: list[int] = np.frombuffer(message, dtype="<i8", offset=_KIND.size).tolist()
    match kind:
        case "forward":
            return kind, (_decode_rows(numbers),)
        case "copy_blocks":
            return kind, (list(zip(numbers[::2], numbers[1::2], strict=True)),)
        case "move_tokens":
            return kind, (numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])
        case "set_storage" | "end":
            return kind, tuple(numbers)
    raise AssertionError(f"a message of kind {kind!r}")


def _decode_rows(numbers: list[int]) -> list[Row]:
    num_rows, block_size = numbers[:2]
    rows: list[Row] = []
    at = 2
    for _ in range(num_rows):
        num_new, num_cached, num_logits, num_blocks, num_past, num_nodes = numbers[at : at + 6]
        blocks_at = at + 6 + num_new
        past_at = blocks_at + num_blocks
        parents_at = past_at + num_past
        end = parents_at + num_nodes
        new_ids = numbers[at + 6 : blocks_at]
        past_ids = numbers[past_at:parents_at]
        if past_ids:
            past_ids = [0] * (num_cached - num_past) + past_ids  # earlier tokens are never read
        table: Any = RemoteTable(numbers[blocks_at:past_at], block_size)
        parents = numbers[parents_at:end] or None
        rows.append(Row(table, new_ids, num_cached, num_logits, past_ids, parents))
        at = end
    return rows
