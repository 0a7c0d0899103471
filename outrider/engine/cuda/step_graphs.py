"""Decode and verify steps as CUDA graphs: which shapes are captured, which one serves a step, and when none does.

A CUDA graph is a recorded sequence of launches, replayed over buffers that stay where they are; `StaticPlan` is a plan
in such buffers. A step is padded to the smallest captured shape that holds it; anything else runs eagerly. A graph is
compared with an eager forward of made-up rows when it is captured, and dropped if it differs. Used by `GraphedPath`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.attention.paged_plan import PagedPlan
from outrider.engine.files.model_files import first_line
from outrider.engine.host_copy import to_device
from outrider.engine.kv_pool import TRASH_BLOCK
from outrider.engine.step_plan import Row, check_ids
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

Array = NDArray[Any]

WIDTHS = (6, 1, 2, 4, 9)
"""Tokens a row that steps are captured for, the most wanted first: a verify of 5 drafts, a decode, a draft that feeds
one more token after all of its drafts were kept, and verifies of 3 and 8."""
FREE_TOKENS = 64
"""Tokens of a padded step that costs what its weights cost to read, however few are real. Doubling it pads more steps,
and runs fewer of them eagerly."""
LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Most difference between the logits of a graph and of an eager forward, as a share of the largest logit."""


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
        """Return zeros on the host, whole and by name, to be filled and handed to `load`."""
        flat = np.zeros(self._flat.numel(), dtype=np.uint8)
        parts = {
            name: flat[begin:end].view(dtype).reshape(shape)
            for name, (begin, end, shape, dtype) in self._layout.items()
        }
        return flat, parts

    def load(self, flat: Array) -> None:
        self._flat.copy_(to_device(flat, self._device), non_blocking=True)


class StaticPlan:
    """Hold a `plan` whose tensors never move: a captured graph reads them, each replay fills them with other rows.

    Every row is `width` tokens wide. A row with fewer new tokens feeds some of its cached ones again, and missing rows
    are made up; what both would write goes to the trash block, so no table knows of it.
    """

    def __init__(
        self, num_rows: int, width: int, table_width: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        """Allocate for num_rows rows whose tables have at most table_width blocks."""
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

    def load(self, rows: Sequence[Row], made_up_id: int = 0) -> int:
        """Fill the plan with at most num_rows rows, reserved, each of at most `width` new tokens and at least as many
        in all; the others are made up of one id. Return how many of `wanted` count.

        Raises InvalidRequest for a token id outside the vocabulary.
        """
        flat, values = self.inputs.new_values()
        ids, positions, write_to = (values[name].reshape(-1, self.width) for name in ("ids", "positions", "write_to"))
        columns, count = np.arange(self.width), len(rows)
        ids[:] = made_up_id
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
        """Return the storage indices of the tokens at positions [b, width] of rows with these tables [b, blocks]."""
        blocks = np.take_along_axis(table, positions // self._block_size, axis=1).astype(np.int64)
        return blocks * self._block_size + positions % self._block_size


def _fill_table(table: Array, blocks: Sequence[Sequence[int]]) -> None:
    """Fill the first rows of a table of zeros, each as far as its blocks go."""
    counts = np.array([len(own) for own in blocks])
    used = np.arange(table.shape[1]) < counts[:, None]  # [b, blocks]
    table[: len(blocks)][used] = np.fromiter(chain.from_iterable(blocks), dtype=np.int32, count=int(counts.sum()))


class Graph(Protocol):
    """A recorded sequence of launches."""

    def replay(self) -> None:
        """Run what was captured once more, on the current stream."""


class GraphMaker(Protocol):
    """The seam to the GPU. Tests put a double there that runs the function again on the same buffers."""

    def capture(self, compute: Callable[[], None]) -> Graph:
        """Run and record `compute`, which uses buffers that outlive it and must not wait for the device.

        Raises what torch raises when it cannot be captured.
        """


class CudaGraphMaker:
    """Captures graphs that share one memory pool: what each needs between its kernels is taken once, by the largest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], None]) -> Graph:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # libraries choose and allocate at their first calls, which a capture forbids
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using CUDA (copies being waited for) while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        return graph


@dataclass(frozen=True, slots=True)
class StepShape:
    """Rows and tokens a row of a captured step."""

    num_rows: int
    width: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width

    def __str__(self) -> str:
        return f"{self.num_rows} rows of {self.width} tokens"


def batch_sizes(max_rows: int) -> list[int]:
    """Return 1, 2, 4, ... and max_rows, the largest first: later captures reuse the memory of the first."""
    sizes = {max_rows, *(1 << n for n in range(max_rows.bit_length()))}
    return sorted((size for size in sizes if size <= max_rows), reverse=True)


def best_shape(shapes: Iterable[StepShape], rows: Sequence[Row]) -> StepShape | None:
    """Return the captured shape with the fewest tokens that holds the rows, or None where padding would cost more."""
    if not rows:
        return None
    width, shortest = max(row.num_new for row in rows), min(row.num_tokens for row in rows)
    fitting = [s for s in shapes if s.num_rows >= len(rows) and width <= s.width <= shortest]
    best = min(fitting, key=lambda shape: shape.num_tokens, default=None)
    if best is None or best.num_tokens <= max(FREE_TOKENS, 2 * sum(row.num_new for row in rows)):
        return best
    return None


@dataclass(slots=True)
class _Captured:
    static: StaticPlan
    graph: Graph
    taps: Sequence[int]
    features: Tensor | None
    """[num_tokens, taps, H], where each replay writes them: memory of the graph, which this reference keeps for it."""


class StepGraphs:
    """Captures and replays graphs of `run`: plan -> logits [N, V] float32, N the length of its `logits_at`, and the
    features [T, taps, H] of all its tokens or None."""

    def __init__(
        self,
        run: Callable[[PagedPlan], tuple[Tensor, Tensor | None]],
        maker: GraphMaker,
        device: torch.device,
        dtype: torch.dtype,
        vocab_size: int,
        block_size: int,
    ) -> None:
        """dtype: of the weights."""
        self._run, self._maker, self._device = run, maker, device
        self._vocab_size, self._block_size = vocab_size, block_size
        self._largest_difference = LARGEST_DIFFERENCE[dtype]
        self._captured: dict[StepShape, _Captured] = {}
        self.taps: Sequence[int] = ()
        """Those that `run` gives now. A step is captured again where one of them is new to it, before its next use: all
        at once would hold up a worker for as long as its start took. What was dropped stays in its graph, for its
        memory and a copy a step."""
        self._logits = torch.empty(0, vocab_size, device=device)  # [most tokens of a shape, V], of the last replay

    @property
    def shapes(self) -> set[StepShape]:
        return set(self._captured)

    def capture(self, max_rows: int, table_width: int, budget_s: float, widths: Sequence[int]) -> None:
        """Capture what fits in budget_s seconds. max_rows: rows a step may have; table_width: blocks a row may have.

        Nothing here is fatal: a shape that is not captured runs eagerly.
        """
        started, sizes = time.monotonic(), batch_sizes(max_rows)
        for shape in (StepShape(size, width) for width in widths for size in sizes):
            if time.monotonic() - started > budget_s:
                log.info("CUDA graphs: %.0f s are over, wider steps run eagerly", budget_s)
                break
            if not self._captured:
                self._logits = torch.empty(sizes[0] * max(widths), self._vocab_size, device=self._device)
            num_rows, width = shape.num_rows, shape.width
            static = StaticPlan(num_rows, width, table_width, self._block_size, self._vocab_size, self._device)
            if not self._add(shape, static):
                break
        log.info("CUDA graphs: %d steps captured in %.1f s", len(self._captured), time.monotonic() - started)

    def _add(self, shape: StepShape, static: StaticPlan) -> bool:
        """Capture a step and keep it if it is right; return whether it could be captured."""
        try:
            captured = self._capture(shape, static)
            if self._proven(shape, captured):
                self._captured[shape] = captured
        except Exception as error:  # a class that waits for the device, or memory
            log.warning("CUDA graphs: %s cannot be captured and run eagerly: %s", shape, _say(error))
            return False
        return True

    def _capture(self, shape: StepShape, static: StaticPlan) -> _Captured:
        static.load([])  # a capture runs the step: what an earlier replay fed would be written where it was
        logits = self._logits[: shape.num_tokens]
        features: Tensor | None = None

        def compute() -> None:
            nonlocal features
            found, features = self._run(static.plan)
            logits.copy_(found)

        graph = self._maker.capture(compute)
        return _Captured(static, graph, self.taps, features)

    def forward(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None] | None:
        """Run a step as ForwardPath.forward does; return logits and features, None when it has to run eagerly."""
        shape = best_shape(self._captured, rows)
        if shape is not None and not set(self.taps) <= set(self._captured[shape].taps):
            self._add(shape, self._captured.pop(shape).static)
        if shape is None or shape not in self._captured:
            return None
        captured = self._captured[shape]
        num_wanted = captured.static.load(rows)
        captured.graph.replay()
        logits = self._logits.index_select(0, captured.static.wanted[:num_wanted])  # [N, V]
        if captured.features is None or not self.taps:
            return logits, None
        features = captured.features.index_select(0, self._new(rows, shape))
        if self.taps != captured.taps:
            columns = np.array([captured.taps.index(tap) for tap in self.taps])
            features = features.index_select(1, to_device(columns, self._device))
        return logits, features

    def _new(self, rows: Sequence[Row], shape: StepShape) -> Tensor:
        """Return the places [sum(num_new)] int64 of the rows' new tokens among those of a padded step."""
        ends = [(i + 1) * shape.width for i in range(len(rows))]
        places = [np.arange(end - row.num_new, end) for end, row in zip(ends, rows, strict=True)]
        return to_device(np.concatenate(places), self._device)

    def _proven(self, shape: StepShape, captured: _Captured) -> bool:
        """Return whether a replay over other rows than were captured gives what an eager forward gives."""
        captured.static.load([], made_up_id=self._vocab_size // 2)
        logits, features = self._run(captured.static.plan)
        captured.graph.replay()
        differences = [_difference(self._logits[: shape.num_tokens], logits)]
        if features is not None and captured.features is not None:
            differences.append(_difference(captured.features, features))
        if not all(difference <= self._largest_difference for difference in differences):
            log.warning(
                "CUDA graphs: %s differ from an eager step by %.1e, the graph is dropped", shape, max(differences)
            )
            return False
        return True


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
