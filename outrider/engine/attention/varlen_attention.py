"""Flash attention over the blocks on a GPU: torch's own, one call in each layer for all rows. The backend of `flash`.

It reads the plan's tensors on the device alone, never row lengths on the host, so that it can be captured in a CUDA
graph. `refusal` returns what of a model it cannot compute (soft caps, sinks, chunks, latent attention, float32) before
the path is created.
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
"""Number of tokens in a block. The block size of flash attention 2, which torch includes, must be a multiple of this
number."""
MAX_HEAD_DIM = 256
"""Maximum number of columns of an attention head that flash attention 2 takes."""
MIN_TORCH = "2.13"
"""First version of torch whose flash attention takes a block table and num_splits without FA3 (pytorch pull request
179760)."""


class VarlenAttention:
    """Attention by torch's flash attention kernel for sequences of different lengths. Implements the interface
    `PagedAttention`, with blocks of BLOCK_SIZE tokens.
    """

    def __init__(self, kernel: Callable[..., Any] | None = None) -> None:
        """kernel: function with the parameters of torch.nn.attention.varlen.varlen_attn; None = that function."""
        if kernel is None:
            from torch.nn.attention.varlen import varlen_attn

            kernel = varlen_attn
        self._kernel = kernel

    def begin(self, plan: PagedPlan) -> None:
        assert plan.block_size % BLOCK_SIZE == 0, f"blocks of {plan.block_size} tokens"

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions) -> Tensor:
        """Compute attention for query [T, Hq, D], of T new tokens and Hq query heads, over keys and values, each
        [num_blocks + 1, block_size, Hkv, D] of Hkv KV heads. Return the output [T, Hq, D].
        """
        if options.chunk is not None or options.softcap is not None or options.sinks is not None:
            raise NotImplementedError("flash attention of torch knows no chunks, soft caps or sinks")
        if not options.causal:
            raise NotImplementedError("not tried with tokens that see later ones")
        output: Tensor = self._kernel(
            query,
            keys,
            values,
            plan.cu_seq_q,
            plan.cu_seq_kv,
            plan.max_q,
            plan.max_kv,
            scale=options.scaling,
            window_size=_window(plan, options.window),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=plan.kv_lens,
            block_table=plan.block_table,
            # With more splits torch 2.13 writes only the first row's output from pages (pytorch issue 194167). With one
            # a row's attention also has the same bits in every batch.
            num_splits=1,
        )
        return output

    def attend_gathered(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedPlan, options: AttentionOptions
    ) -> Tensor:
        """Raise NotImplementedError: the kernel takes only keys and values of the same width."""
        raise NotImplementedError("latent attention has keys and values of different widths")


def _window(plan: PagedPlan, window: int | None) -> tuple[int, int]:
    # The numbers of earlier and of later keys that a query sees, -1 for all. A row's last query sees its last key.
    if window is not None:
        return window - 1, 0
    if plan.max_q == 1:
        # A row's only query sees every key anyway, and without a bound the kernel packs the query heads of a KV head.
        return -1, -1
    return -1, 0


def torch_refusal(version: str) -> str | None:
    """Return the reason why this version of torch cannot run VarlenAttention; None if it can."""
    if Version(version).release >= Version(MIN_TORCH).release:
        return None
    return f"torch {version} takes no num_splits with pages, which {MIN_TORCH} and later do"


def refusal(model: PreTrainedModel) -> str | None:
    """Return the reason why VarlenAttention cannot run this model on its device; None if none is known.

    Only what is known without running the model is checked; the self-test finds the rest.
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
    return model_refusal(model)


def model_refusal(model: PreTrainedModel) -> str | None:
    """Return the reason why VarlenAttention cannot run this model on any device; None if none is known."""
    config = model.config.get_text_config(decoder=True)
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention needs bfloat16 or float16, the weights are {str(model.dtype).removeprefix('torch.')}"
    if config.model_type in _WITH_SINKS:
        return "flash attention of torch has no attention sinks"
    for index in range(config.num_hidden_layers):
        layer = layer_config(config, index)
        for name, feature in _UNSUPPORTED.items():
            if getattr(layer, name, None):
                return f"flash attention of torch has no {feature} ({name} is {getattr(layer, name)})"
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            return f"heads are {head_dim} wide, flash attention needs a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


_UNSUPPORTED = {
    "attn_logit_softcapping": "soft caps",
    "attention_chunk_size": "chunks",
    "kv_lora_rank": "latent attention",
}
"""Features that flash attention does not have, by the configuration's option that turns them on."""
_WITH_SINKS = frozenset({"gpt_oss"})
"""Model types with attention sinks, for which the configuration has no option."""
