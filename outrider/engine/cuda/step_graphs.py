"""Decode and verify steps as CUDA graphs: which shapes are captured, which one serves a step, and when none does.

Used by `GraphedPath`. A step is padded to the smallest captured shape that holds it; anything else runs eagerly. A
graph is compared with an eager forward on the first rows it serves, and dropped if it differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.cuda.graphs import Graph, GraphMaker
from outrider.engine.cuda.static_plan import StaticPlan
from outrider.engine.model_files import first_line
from outrider.engine.paths.paged_plan import PagedPlan
from outrider.engine.step_plan import Row
from outrider.wire.log import get_logger

log = get_logger(__name__)

WIDTHS = (6, 1, 2, 4, 9)
"""Tokens a row that steps are captured for, the most wanted first: a verify of 5 drafts, a decode, a draft that feeds
one more token after all of its drafts were kept, and verifies of 3 and 8."""
FREE_TOKENS = 64
"""A padded step of at most this many tokens costs what its weights cost to read, however few are real."""
LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Between the logits of a graph and of an eager forward, as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class Shape:
    num_rows: int
    width: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width

    def __str__(self) -> str:
        return f"{self.num_rows} rows of {self.width} tokens"


def batch_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, ... and max_rows, the largest first: later captures reuse the memory of the first."""
    sizes = {max_rows, *(1 << n for n in range(max_rows.bit_length()))}
    return sorted((size for size in sizes if size <= max_rows), reverse=True)


def best_shape(shapes: Iterable[Shape], rows: Sequence[Row]) -> Shape | None:
    """The captured shape with the fewest tokens that holds the rows, unless padding would cost more than it saves."""
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
    proven: bool = False
    """It has served rows and agreed with an eager forward."""


class StepGraphs:
    """Graphs of `run`: plan -> logits [N, V] float32, N the length of its `logits_at`."""

    def __init__(
        self,
        run: Callable[[PagedPlan], Tensor],
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
        self._captured: dict[Shape, _Captured] = {}
        self._logits = torch.empty(0, vocab_size, device=device)  # [most tokens of a shape, V], of the last replay

    @property
    def shapes(self) -> set[Shape]:
        return set(self._captured)

    def capture(self, max_rows: int, table_width: int, budget_s: float, widths: Sequence[int]) -> None:
        """Capture what fits in budget_s seconds. max_rows: rows a step may have; table_width: blocks a row may have.

        Nothing here is fatal: a shape that is not captured runs eagerly.
        """
        started, sizes = time.monotonic(), batch_sizes(max_rows)
        for shape in (Shape(size, width) for width in widths for size in sizes):
            if time.monotonic() - started > budget_s:
                log.info("CUDA graphs: %.0f s are over, wider steps run eagerly", budget_s)
                break
            try:
                if not self._captured:
                    self._logits = torch.empty(sizes[0] * max(widths), self._vocab_size, device=self._device)
                self._captured[shape] = self._capture(shape, table_width)
            except Exception as error:  # a class that waits for the device, or memory
                log.warning("CUDA graphs: %s cannot be captured and run eagerly: %s", shape, _say(error))
                break
        log.info("CUDA graphs: %d steps captured in %.1f s", len(self._captured), time.monotonic() - started)

    def _capture(self, shape: Shape, table_width: int) -> _Captured:
        static = StaticPlan(shape.num_rows, shape.width, table_width, self._block_size, self._vocab_size, self._device)
        logits = self._logits[: shape.num_tokens]

        def compute() -> None:
            logits.copy_(self._run(static.plan))

        return _Captured(static, self._maker.capture(compute))

    def forward(self, rows: Sequence[Row]) -> Tensor | None:
        """As ForwardPath.forward; None when the step has to run eagerly."""
        shape = best_shape(self._captured, rows)
        if shape is None:
            return None
        captured = self._captured[shape]
        num_wanted = captured.static.load(rows)
        captured.graph.replay()
        logits = self._logits.index_select(0, captured.static.wanted[:num_wanted])  # [N, V]
        return logits if captured.proven else self._prove(shape, rows, logits)

    def _prove(self, shape: Shape, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """The graph's first rows, once more without it; that also writes their KV again, should the graph be wrong."""
        eager = self._run(PagedPlan.build(rows, self._device, self._vocab_size))
        if not bool(eager.isfinite().all()):
            return eager  # the model's own fault: nothing to compare with
        difference = float((logits - eager).abs().max() / eager.abs().max()) if logits.numel() else 0.0
        if difference <= self._largest_difference:
            self._captured[shape].proven = bool(logits.numel())
        else:
            log.warning("CUDA graphs: %s differ from an eager step by %.1e, the graph is dropped", shape, difference)
            del self._captured[shape]
        return eager


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
