"""The `flash` path, for a GPU: the paged one over flash attention, and CUDA graphs where a step has a captured shape.

Made by `attention_choice` for models that `varlen_attention` can run; the self-test runs it
eagerly, `prepare` captures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.attention.paged import PagedPath
from outrider.engine.attention.varlen_attention import BLOCK_SIZE, VarlenAttention, why_not
from outrider.engine.cuda.step_graphs import WIDTHS, CudaGraphMaker, GraphMaker, StepGraphs, StepShape
from outrider.engine.errors import PathUnavailable
from outrider.engine.step_plan import Row
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

CAPTURE_BUDGET_S = 30.0
"""Seconds that a start may take for capturing steps; wider ones then run eagerly. Doubling it doubles that wait."""


class GraphedPath:
    """Implements `ForwardPath`, `Prepares` and `GivesFeatures`."""

    name = "flash"
    batch_invariant = False
    block_size = BLOCK_SIZE

    def __init__(
        self,
        paged: PagedPath,
        model: PreTrainedModel,
        vocab_size: int,
        maker: GraphMaker,
        widths: Sequence[int] = WIDTHS,
    ) -> None:
        """Take a paged path over an attention that reads nothing but a plan's tensors. widths: as `WIDTHS`."""
        self._paged, self._maker = paged, maker
        self._widths = widths
        self._device, self._dtype, self._vocab_size = model.device, model.dtype, vocab_size
        self.uses_graphs = True
        """False: every forward runs eagerly, to be compared with."""
        self._graphs: StepGraphs | None = None
        """None until `prepare`."""
        self.features = torch.empty(0)

    @property
    def captured(self) -> set[StepShape]:
        """Return the steps that run as graphs."""
        return set() if self._graphs is None else self._graphs.shapes

    @property
    def kv_bytes_per_token(self) -> int:
        return self._paged.kv_bytes_per_token

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        self._graphs = None  # they name the old storage's addresses
        self._paged.set_storage(num_blocks, block_size)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._paged.copy_blocks(copies)

    def set_taps(self, taps: Sequence[int]) -> None:
        self._paged.set_taps(taps)
        self.features = torch.empty(0)
        if self._graphs is not None:
            self._graphs.taps = tuple(taps)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        graphs = self._graphs if self.uses_graphs else None
        given = None if graphs is None else graphs.forward(rows)
        logits, features = (self._paged.forward(rows), self._paged.features) if given is None else given
        if features is not None:
            self.features = features
        return logits

    @torch.inference_mode()
    def prepare(self, max_rows: int, context_limit: int) -> None:
        """Capture graphs for steps of up to max_rows rows. The storage must have been allocated by a forward."""
        table_width = -(-context_limit // self.block_size)
        self._graphs = StepGraphs(
            self._paged.run, self._maker, self._device, self._dtype, self._vocab_size, self.block_size
        )
        self._graphs.capture(max_rows, table_width, CAPTURE_BUDGET_S, self._widths)


def graphed_path(model: PreTrainedModel, vocab_size: int) -> GraphedPath:
    """For a model on a GPU. Raises PathUnavailable."""
    reason = why_not(model)
    if reason is not None:
        raise PathUnavailable(reason)
    return GraphedPath(PagedPath(model, vocab_size, VarlenAttention()), model, vocab_size, CudaGraphMaker(model.device))
