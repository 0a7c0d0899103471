"""A plan whose tensors never move: a captured graph reads them, and each replay fills them with other rows.

Every row is `width` tokens wide. A row with fewer new tokens feeds some of its cached ones again, and rows that are
missing are made up; what both would write goes to the trash block, so no table knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device
from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.paths.paged_plan import PagedPlan
from outrider.engine.step_plan import Row, check_ids

Array = NDArray[Any]


class Inputs:
    """Named buffers on the device that one copy fills."""

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]], device: torch.device) -> None:
        """shapes: (shape, dtype) by name, the wide dtypes first, so that every view is aligned."""
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
        begin, end, shape, dtype = self._layout[name]
        return self._flat[begin:end].view(torch.from_numpy(np.empty(0, dtype)).dtype).view(shape)

    def new_values(self) -> tuple[Array, dict[str, Array]]:
        """Zeros on the host, whole and by name: to be filled and handed to `load`."""
        flat = np.zeros(self._flat.numel(), dtype=np.uint8)
        parts = {
            name: flat[begin:end].view(dtype).reshape(shape)
            for name, (begin, end, shape, dtype) in self._layout.items()
        }
        return flat, parts

    def load(self, flat: Array) -> None:
        self._flat.copy_(to_device(flat, self._device), non_blocking=True)


class StaticPlan:
    """`plan` for `num_rows` rows of `width` tokens, whose tables have at most `table_width` blocks."""

    def __init__(
        self, num_rows: int, width: int, table_width: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        assert width <= block_size, "made-up rows must fit the trash block"
        self.num_rows, self.width = num_rows, width
        self._block_size, self._vocab_size = block_size, vocab_size
        num_tokens = num_rows * width
        self.inputs = Inputs(
            {
                "ids": ((num_tokens,), np.int64),
                "positions": ((num_tokens,), np.int64),
                "write_to": ((num_tokens,), np.int64),
                "wanted": ((num_tokens,), np.int64),
                "kv_lens": ((num_rows,), np.int32),
                "cu_seq_kv": ((num_rows + 1,), np.int32),
                "table": ((num_rows, table_width), np.int32),
            },
            device,
        )
        self.wanted = self.inputs["wanted"]  # [T] int64: which tokens' logits the rows ask for, as many as they are
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
        self.load([])  # whatever runs before the first rows come stays in the trash block

    def load(self, rows: Sequence[Row]) -> int:
        """At most num_rows rows, reserved, each of at most `width` new tokens and of at least `width` in all.

        The other rows are made up. Returns how many of `wanted` count.

        Raises InvalidRequest for a token id outside the vocabulary.
        """
        flat, values = self.inputs.new_values()
        ids, positions, write_to = (values[name].reshape(-1, self.width) for name in ("ids", "positions", "write_to"))
        columns, count = np.arange(self.width), len(rows)
        positions[:] = columns
        write_to[:] = TRASH_BLOCK * self._block_size + columns
        values["kv_lens"][:] = self.width
        wanted = [
            (i + 1) * self.width - n + j for i, row in enumerate(rows) for n in [row.num_logits] for j in range(n)
        ]
        if rows:
            num_tokens = np.array([row.num_tokens for row in rows])  # [b]
            ids[:count] = [row.last_ids(self.width) for row in rows]
            positions[:count] += (num_tokens - self.width)[:, None]
            values["kv_lens"][:count] = num_tokens
            _fill_table(values["table"], [row.table.blocks for row in rows])
            places = self._places(values["table"][:count], positions[:count])
            is_new = positions[:count] >= np.array([row.num_cached for row in rows])[:, None]
            np.copyto(write_to[:count], places, where=is_new)
        check_ids(values["ids"], self._vocab_size)
        values["cu_seq_kv"][1:] = values["kv_lens"].cumsum()
        values["wanted"][: len(wanted)] = wanted
        self.inputs.load(flat)
        return len(wanted)

    def _places(self, table: Array, positions: Array) -> Array:
        """Storage indices of the tokens at positions [b, width] of rows with these tables [b, blocks]."""
        blocks = np.take_along_axis(table, positions // self._block_size, axis=1).astype(np.int64)
        return blocks * self._block_size + positions % self._block_size


def _fill_table(table: Array, blocks: Sequence[Sequence[int]]) -> None:
    """The first rows of a table of zeros, each as far as its blocks go."""
    counts = np.array([len(own) for own in blocks])
    used = np.arange(table.shape[1]) < counts[:, None]  # [b, blocks]
    table[: len(blocks)][used] = np.fromiter(chain.from_iterable(blocks), dtype=np.int32, count=int(counts.sum()))
