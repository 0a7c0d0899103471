"""A plan in buffers with fixed addresses: a captured graph reads it, and is replayed over other rows each time.

Used by `step_graphs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.attention.paged_plan import PagedPlan
from outrider.engine.host_copy import to_device
from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.step_plan import Row, check_ids

Array = NDArray[Any]


class Inputs:
    """Named device buffers for a plan's tensors: views of one flat buffer, so that one copy from the host fills all."""

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]], device: torch.device) -> None:
        """shapes: (shape, dtype) of each buffer by name, the wide dtypes first, so that every view is aligned."""
        self._layout: dict[str, tuple[int, int, tuple[int, ...], np.dtype[np.generic]]] = {}
        end = 0
        for name, (shape, kind) in shapes.items():
            dtype = np.dtype(kind)
            size = int(np.prod(shape)) * dtype.itemsize
            self._layout[name] = (end, end + size, shape, dtype)
            end += size
        self._device = device
        self._flat = torch.zeros(end, dtype=torch.uint8, device=device)

    def __getitem__(self, name: str) -> Tensor:
        """Return the buffer of this name, a view with a fixed address."""
        begin, end, shape, dtype = self._layout[name]
        return self._flat[begin:end].view(torch.from_numpy(np.empty(0, dtype)).dtype).view(shape)

    def new_values(self) -> tuple[Array, dict[str, Array]]:
        """Return zeros for all buffers, on the host: one flat array, which is passed to `load`, and views of it by the
        buffers' names, through which it is filled.
        """
        flat = np.zeros(self._flat.numel(), dtype=np.uint8)
        views: dict[str, Array] = {}
        for name, (begin, end, shape, dtype) in self._layout.items():
            views[name] = flat[begin:end].view(dtype).reshape(shape)
        return flat, views

    def load(self, flat: Array) -> None:
        """Copy `flat`, an array of `new_values` that has been filled, from the host into the buffers."""
        self._flat.copy_(to_device(flat, self._device), non_blocking=True)


class StaticPlan:
    """Plan (`PagedPlan`) whose tensors never move: a graph reads them, and each replay fills them for other rows.

    Every row (sequence) has `width` tokens. A row with fewer new tokens feeds some of its cached tokens again. Missing
    rows are made up, so that there are always `num_rows`. The keys and values of repeated and made-up tokens are
    written to the trash block, so that they change no sequence.

        num_rows 2, width 2, block_size 256, one row of 4 cached and 1 new token in block 7:
        positions [3, 4, 0, 1]   write_to [0, 7 * 256 + 4, 0, 1]   kv_lens [5, 2]
    """

    def __init__(
        self, num_rows: int, width: int, table_width: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        """Allocate the buffers for `num_rows` rows.

        width: number of tokens of each row. table_width: maximum number of blocks of a row. block_size: number of
        tokens in a block. vocab_size: number of token ids that may be fed.
        """
        assert width <= block_size, "made-up rows must fit the trash block"
        self.num_rows = num_rows
        self.width = width
        self._block_size = block_size
        self._vocab_size = vocab_size
        num_tokens = num_rows * width
        self.inputs = Inputs(
            {
                "ids": ((num_tokens,), np.int64),
                "positions": ((num_tokens,), np.int64),
                "write_to": ((num_tokens,), np.int64),
                "logits_at": ((num_tokens,), np.int64),
                "kv_lens": ((num_rows,), np.int32),
                "cu_seq_kv": ((num_rows + 1,), np.int32),
                "table": ((num_rows, table_width), np.int32),
            },
            device,
        )
        """The plan's buffers on the device, which `load` fills."""
        self.logits_at = self.inputs["logits_at"]
        """Indices of the tokens whose logits the rows request, [T] int64, where T = num_rows * width. Only the first
        entries are valid, as many as `load` returned."""
        self.plan = PagedPlan(
            input_ids=self.inputs["ids"][None],
            position_ids=self.inputs["positions"][None],
            cu_seq_q=torch.arange(0, num_tokens + 1, width, dtype=torch.int32, device=device),
            kv_lens=self.inputs["kv_lens"],
            cu_seq_kv=self.inputs["cu_seq_kv"],
            block_table=self.inputs["table"],
            write_to=self.inputs["write_to"],
            logits_at=torch.arange(num_tokens, device=device),
            gather=None,
            max_q=width,
            max_kv=table_width * block_size,
            block_size=block_size,
            rows=(),
        )
        """Plan that the captured forward reads. The forward computes the logits of all tokens of the plan; `logits_at`
        selects among them afterwards."""
        self.load([])  # until the first rows are loaded everything stays in the trash block

    def load(self, rows: Sequence[Row], made_up_id: int = 0) -> int:
        """Fill the plan, made for `num_rows` rows of `width` tokens. Return the number of valid entries of `logits_at`.

        rows: at most `num_rows`, with blocks reserved in their block tables. Each must have at most `width` new tokens,
        and at least `width` tokens, cached and new. Missing rows are made up of tokens of the id `made_up_id`. Raises
        InvalidRequest for a token id outside the vocabulary.
        """
        flat, values = self.inputs.new_values()
        ids = values["ids"].reshape(-1, self.width)  # [num_rows, width]
        positions = values["positions"].reshape(-1, self.width)  # [num_rows, width]
        write_to = values["write_to"].reshape(-1, self.width)  # [num_rows, width]
        columns = np.arange(self.width)
        ids[:] = made_up_id
        positions[:] = columns
        write_to[:] = TRASH_BLOCK * self._block_size + columns
        values["kv_lens"][:] = self.width
        logits_at: list[int] = []
        num_cached: list[int] = []
        num_tokens: list[int] = []
        for index, row in enumerate(rows):
            end = (index + 1) * self.width
            logits_at += range(end - row.num_logits, end)
            num_cached.append(row.num_cached)
            num_tokens.append(row.num_tokens)
        if rows:
            count = len(rows)
            ids[:count] = [row.last_ids(self.width) for row in rows]
            positions[:count] += (np.array(num_tokens) - self.width)[:, None]
            values["kv_lens"][:count] = num_tokens
            _fill_table(values["table"], [row.table.blocks for row in rows])
            indices = self._storage_indices(values["table"][:count], positions[:count])  # [b, width]
            is_new = positions[:count] >= np.array(num_cached)[:, None]  # [b, width]
            np.copyto(write_to[:count], indices, where=is_new)
        check_ids(values["ids"], self._vocab_size)
        values["cu_seq_kv"][1:] = values["kv_lens"].cumsum()
        values["logits_at"][: len(logits_at)] = logits_at
        self.inputs.load(flat)
        return len(logits_at)

    def _storage_indices(self, table: Array, positions: Array) -> Array:
        # table [b, blocks], positions [b, width] -> [b, width] int64
        blocks = np.take_along_axis(table, positions // self._block_size, axis=1).astype(np.int64)
        return blocks * self._block_size + positions % self._block_size


def _fill_table(table: Array, blocks: Sequence[Sequence[int]]) -> None:
    # table is of zeros, the trash block. blocks [[7, 2], [5]] give [[7, 2, 0], [5, 0, 0]]
    counts = np.array([len(row_blocks) for row_blocks in blocks])
    is_used = np.arange(table.shape[1]) < counts[:, None]  # [b, blocks]
    table[: len(blocks)][is_used] = np.fromiter(chain.from_iterable(blocks), dtype=np.int32, count=int(counts.sum()))
