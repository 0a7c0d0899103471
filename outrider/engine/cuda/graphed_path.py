"""The `flash` path, for a GPU: the paged path with flash attention, and with CUDA graphs for steps of captured shapes.

`attention_choice` creates it for models that `varlen_attention` can run. The self-test runs it eagerly; `prepare`
captures the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.attention.paged import PagedPath
from outrider.engine.attention.varlen_attention import BLOCK_SIZE, VarlenAttention, refusal
from outrider.engine.cuda.step_graphs import WIDTHS, CudaGraphMaker, GraphMaker, StepGraphs, StepShape
from outrider.engine.errors import PathUnavailable
from outrider.engine.step_plan import Row
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

CAPTURE_BUDGET_S = 30.0
"""Maximum time in seconds for capturing CUDA graphs when a worker starts. Steps of the shapes that are still missing
when the time is over run without a graph."""


class GraphedPath:
    """Attention path that wraps a paged path: it replays a CUDA graph for each step of a captured shape, and runs other
    steps eagerly. Implements the interfaces `ForwardPath`, `PreparedPath` and `FeaturePath`.
    """

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
        """paged: a path with an attention backend that reads nothing but a plan's tensors. vocab_size: number of logits
        at a position. maker: captures the graphs. widths: numbers of tokens per row that are captured.
        """
        self._paged = paged
        self._maker = maker
        self._widths = widths
        self._device = model.device
        self._dtype = model.dtype
        self._vocab_size = vocab_size
        self.uses_graphs = True
        """Whether graphs are replayed. False = every forward runs eagerly, to compare the two."""
        self._graphs: StepGraphs | None = None  # until `prepare`
        self.features = torch.empty(0)

    @property
    def captured(self) -> set[StepShape]:
        """Shapes of the steps that are run by replaying a graph."""
        if self._graphs is None:
            return set()
        return self._graphs.shapes

    @property
    def kv_bytes_per_token(self) -> int:
        return self._paged.kv_bytes_per_token

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        self._graphs = None  # they have addresses of the old storage
        self._paged.set_storage(num_blocks, block_size)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._paged.copy_blocks(copies)

    def set_taps(self, taps: Sequence[int]) -> None:
        self._paged.set_taps(taps)
        self.features = torch.empty(0)
        if self._graphs is not None:
            self._graphs.taps = tuple(taps)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        if self._graphs is not None and self.uses_graphs:
            replayed = self._graphs.forward(rows)
            if replayed is not None:
                logits, features = replayed
                if features is not None:
                    self.features = features
                return logits
        logits = self._paged.forward(rows)
        self.features = self._paged.features
        return logits

    @torch.inference_mode()
    def prepare(self, max_rows: int, context_limit: int) -> None:
        """Capture graphs for steps of up to `max_rows` sequences, each of up to `context_limit` tokens. A forward must
        have run before, which allocates the storage.
        """
        table_width = -(-context_limit // self.block_size)  # blocks of the longest row
        self._graphs = StepGraphs(
            self._paged.run, self._maker, self._device, self._dtype, self._vocab_size, self.block_size
        )
        self._graphs.capture(max_rows, table_width, CAPTURE_BUDGET_S, self._widths)


def graphed_path(model: PreTrainedModel, vocab_size: int) -> GraphedPath:
    """Return the `flash` path of a model on a GPU. Raises PathUnavailable if flash attention cannot run the model."""
    reason = refusal(model)
    if reason is not None:
        raise PathUnavailable(reason)
    return GraphedPath(PagedPath(model, vocab_size, VarlenAttention()), model, vocab_size, CudaGraphMaker(model.device))
