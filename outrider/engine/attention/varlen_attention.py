"""The `paged` path's attention on a GPU: torch's flash attention over the blocks, by one call a layer for all rows.

It reads the plan's device tensors alone, never the host's row lengths, so it may be captured in a CUDA graph. `why_not`
finds what it cannot do (soft caps, sinks, chunks, latent attention, float32) before the path is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.architectures.layer_memory import layer_config
from outrider.engine.attention.paged_plan import AttentionOptions, PagedPlan

BLOCK_SIZE = 256
"""Tokens a block. Flash attention 2, which torch carries, takes pages of a multiple of this."""
MAX_HEAD_DIM = 256
"""Columns of a head."""
MIN_TORCH = "2.13"
"""First version whose flash attention takes pages and num_splits without FA3 (pytorch pull request 179760)."""


class VarlenAttention:
    """Attends with torch's variable-length kernel. Implements `PagedAttention` for blocks of BLOCK_SIZE tokens."""

    def __init__(self, kernel: Callable[..., Any] | None = None) -> None:
        """Take a kernel that is called as torch.nn.attention.varlen.varlen_attn; None takes that function itself."""
        if kernel is None:
            from torch.nn.attention.varlen import varlen_attn

            kernel = varlen_attn
        self._kernel = kernel

    def begin(self, plan: PagedPlan) -> None:
        assert plan.block_size % BLOCK_SIZE == 0, f"blocks of {plan.block_size} tokens"

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions) -> Tensor:
        """Attend with query [T, Hq, D] over keys and values [num_blocks + 1, block_size, Hkv, D]; return [T, Hq, D]."""
        if options.chunk is not None or options.softcap is not None or options.sinks is not None:
            raise NotImplementedError("flash attention of torch knows no chunks, soft caps or sinks")
        if not options.causal:
            raise NotImplementedError("not tried with tokens that see later ones")
        output: Tensor = self._kernel(
            *(query, keys, values, plan.cu_seq_q, plan.cu_seq_kv, plan.max_q, plan.max_kv),
            scale=options.scaling,
            window_size=_window(plan, options.window),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=plan.kv_lens,
            block_table=plan.block_table,
            # With pages, torch 2.13 writes only the first row's output of a split one (pytorch issue 194167). One also
            # makes a row's attention the same bits in every batch.
            num_splits=1,
        )
        return output

    def attend_gathered(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions
    ) -> Tensor:
        raise NotImplementedError("latent attention has keys and values of different widths")


def _window(plan: PagedPlan, window: int | None) -> tuple[int, int]:
    """Return the (left, right) keys that a query sees beside its own, -1 for all. The last query sees the last key."""
    if window is not None:
        return window - 1, 0
    # A row's only query sees every key anyway, and without a bound the kernel packs the query heads of a KV head.
    return (-1, -1) if plan.max_q == 1 else (-1, 0)


def torch_refusal(version: str) -> str | None:
    """Return why that version of torch cannot run VarlenAttention, or None."""
    if Version(version).release >= Version(MIN_TORCH).release:
        return None
    return f"torch {version} takes no num_splits with pages, which {MIN_TORCH} and later do"


def why_not(model: PreTrainedModel) -> str | None:
    """Return what keeps this model, on its device, from VarlenAttention, or None.

    Reports only what can be known without running it: the self-test judges the rest.
    """
    if model.device.type != "cuda":
        return f"flash attention needs a GPU, the model is on {model.device.type}"
    if torch.version.hip is not None:
        return "not tried on ROCm"
    refusal = torch_refusal(torch.__version__)
    if refusal is not None:
        return refusal
    if torch.cuda.get_device_capability(model.device) < (8, 0):
        return f"{torch.cuda.get_device_name(model.device)} is older than compute capability 8.0"
    return why_not_shape(model)


def why_not_shape(model: PreTrainedModel) -> str | None:
    """Return what in the model alone, whatever its device, keeps it from VarlenAttention, or None."""
    config = model.config.get_text_config(decoder=True)
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention needs bfloat16 or float16, the weights are {str(model.dtype).removeprefix('torch.')}"
    if config.model_type in _WITH_SINKS:
        return "flash attention of torch has no attention sinks"
    for index in range(config.num_hidden_layers):
        layer = layer_config(config, index)
        for name, what in _UNKNOWN.items():
            if getattr(layer, name, None):
                return f"flash attention of torch has no {what} ({name} is {getattr(layer, name)})"
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            return f"heads are {head_dim} wide, flash attention needs a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


_UNKNOWN = {
    "attn_logit_softcapping": "soft caps",
    "attention_chunk_size": "chunks",
    "kv_lora_rank": "latent attention",
}
_WITH_SINKS = frozenset({"gpt_oss"})
