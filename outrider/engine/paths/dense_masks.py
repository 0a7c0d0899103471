"""Masks for the `dense` path where a row is a token tree: transformers takes ready ones as they are.

Its own come from the columns alone, in which a node's siblings would be its past.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.engine.paths.layer_limits import declared, layer_limits
from outrider.engine.step_plan import Row, StepPlan
from outrider.engine.token_tree import seen

OWN_WINDOWS = ("gpt_neo",)
"""Model types whose modules cut windows out of the columns themselves, whatever the mask says."""


class TreeMasks:
    """For one model. Classes with layers of several kinds take a mask for each, by the kind's name."""

    def __init__(self, config: PreTrainedConfig, *, takes_positions: bool) -> None:
        """config: the text model's own. takes_positions: or the model counts columns (ALiBi)."""
        self._model_type, self._takes_positions = config.model_type, takes_positions
        kinds = declared(config, "layer_types") or ["full_attention"] * config.num_hidden_layers
        self._limits = {kind: layer_limits(config, index) for index, kind in enumerate(kinds)}

    def of(self, rows: Sequence[Row], plan: StepPlan, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """[B, 1, q, L], 0 or the least number, to be added to the scores; by kind where there are several.

        Raises NotImplementedError, at the self-test, for a model that takes places in the cache for positions.
        """
        if not self._takes_positions:
            raise NotImplementedError(f"{self._model_type} takes no positions")
        if self._model_type in OWN_WINDOWS:
            raise NotImplementedError(f"the modules of {self._model_type} count their windows by columns")
        masks = {kind: _mask(rows, plan, window, chunk, dtype) for kind, (window, chunk) in self._limits.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _mask(rows: Sequence[Row], plan: StepPlan, window: int | None, chunk: int | None, dtype: torch.dtype) -> Tensor:
    width, kv_len = plan.num_queries, plan.kv_len
    sees = np.zeros((len(rows), 1, width, kv_len), dtype=bool)
    for i, row in enumerate(rows):
        sees[i, 0, :, kv_len - row.num_tokens :] = seen(row.num_tokens, row.parents, width, window, chunk)
    mask = torch.where(torch.from_numpy(sees), 0.0, torch.finfo(dtype).min)
    return mask.to(plan.input_ids.device, dtype)
