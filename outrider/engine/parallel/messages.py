"""The messages by which rank 0 commands its followers: which call of the path comes next. They carry integers alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.engine.step_plan import Row

_KIND = struct.Struct("<16s")
FORWARD, COPY, MOVE, STORAGE, END = "forward", "copy_blocks", "move_tokens", "set_storage", "end"
"""Kinds of messages: methods of `ForwardPath`, and END when the worker stops in good order."""


@dataclass(frozen=True, slots=True)
class LentTable:
    """A block table on another rank, as far as a path reads it."""

    blocks: list[int]
    block_size: int


def encode_forward(rows: Sequence[Row], *, with_past: bool) -> bytes:
    """Encode a forward.

    with_past: send cached tokens too, up to the widest row's new ones: the path may feed them again (`Row.last_ids`).
    """
    widest = max((row.num_new for row in rows), default=0)
    numbers: list[int] = [len(rows), rows[0].table.block_size if rows else 1]
    for row in rows:
        past = row.last_ids(min(widest, row.num_tokens))[: -row.num_new] if with_past else []
        parents = row.parents or ()
        numbers += (row.num_new, row.num_cached, row.num_logits, len(row.table.blocks), len(past), len(parents))
        numbers += row.new_ids
        numbers += row.table.blocks
        numbers += past
        numbers += parents
    return encode(FORWARD, numbers)


def encode(kind: str, numbers: Sequence[int] = ()) -> bytes:
    """Encode a message of one of the other kinds: (from, to) pairs one after the other for COPY, sources and then
    destinations for MOVE, the arguments of STORAGE, nothing for END.
    """
    return _KIND.pack(kind.encode()) + np.array(numbers, dtype="<i8").tobytes()


def decode(message: bytes) -> tuple[str, tuple[Any, ...]]:
    """Return the kind of a message, and the arguments of that method."""
    kind = _KIND.unpack_from(message)[0].rstrip(b"\0").decode()
    numbers: list[int] = np.frombuffer(message, dtype="<i8", offset=_KIND.size).tolist()
    match kind:
        case "forward":
            return kind, (_rows(numbers),)
        case "copy_blocks":
            return kind, (list(zip(numbers[::2], numbers[1::2], strict=True)),)
        case "move_tokens":
            return kind, (numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])
        case "set_storage" | "end":
            return kind, tuple(numbers)
    raise AssertionError(f"a message of kind {kind!r}")


def _rows(numbers: list[int]) -> list[Row]:
    num_rows, block_size, at = numbers[0], numbers[1], 2
    rows = []
    for _ in range(num_rows):
        num_new, num_cached, num_logits, num_blocks, num_past, num_nodes = numbers[at : at + 6]
        at += 6
        new_ids, at = numbers[at : at + num_new], at + num_new
        blocks, at = numbers[at : at + num_blocks], at + num_blocks
        past, at = numbers[at : at + num_past], at + num_past
        parents, at = numbers[at : at + num_nodes] or None, at + num_nodes
        past_ids = [0] * (num_cached - num_past) + past if past else []  # earlier tokens are never read
        table: Any = LentTable(blocks, block_size)
        rows.append(Row(table, new_ids, num_cached, num_logits, past_ids, parents))
    return rows
