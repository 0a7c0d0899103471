"""The messages by which rank 0 commands its followers: which forward comes next. They carry nothing but integers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.engine.step_plan import Row

_KIND = struct.Struct("<8s")
_FORWARD, _COPY, _MOVE, _STORAGE, _END = b"forward", b"copy", b"move", b"storage", b"end"


@dataclass(frozen=True, slots=True)
class LentTable:
    """A block table on another rank, as far as a path reads it."""

    blocks: list[int]
    block_size: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a forward over these rows."""

    rows: list[Row]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy blocks, (from, to) pairs."""

    copies: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MoveTokens:
    """Move KV between storage indices."""

    sources: list[int]
    destinations: list[int]


@dataclass(frozen=True, slots=True)
class SetStorage:
    """Replace the storage by an empty one."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class End:
    """The worker stops in good order."""


Message = Forward | CopyBlocks | MoveTokens | SetStorage | End


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
    return _pack(_FORWARD, numbers)


def encode_copies(copies: Sequence[tuple[int, int]]) -> bytes:
    return _pack(_COPY, [block for pair in copies for block in pair])


def encode_move(sources: Sequence[int], destinations: Sequence[int]) -> bytes:
    return _pack(_MOVE, [*sources, *destinations])


def encode_storage(num_blocks: int, block_size: int) -> bytes:
    return _pack(_STORAGE, [num_blocks, block_size])


def encode_end() -> bytes:
    return _pack(_END, [])


def decode(message: bytes) -> Message:
    kind = _KIND.unpack_from(message)[0].rstrip(b"\0")
    numbers: list[int] = np.frombuffer(message, dtype="<i8", offset=_KIND.size).tolist()
    if kind == _FORWARD:
        return Forward(_rows(numbers))
    if kind == _COPY:
        return CopyBlocks(list(zip(numbers[::2], numbers[1::2], strict=True)))
    if kind == _MOVE:
        return MoveTokens(numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])
    if kind == _STORAGE:
        return SetStorage(*numbers)
    assert kind == _END, f"a message of kind {kind!r}"
    return End()


def _pack(kind: bytes, numbers: Sequence[int]) -> bytes:
    return _KIND.pack(kind) + np.array(numbers, dtype="<i8").tobytes()


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
