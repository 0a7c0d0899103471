"""Which keys a layer's queries may see, as the model's class reads its configuration. Used by every path."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedConfig


def layer_limits(config: PreTrainedConfig, index: int) -> tuple[int | None, int | None]:
    """-> (window, chunk) of a layer, in keys; None for all.

    Of classes whose attention leaves them to the mask. Those that tell the attention function are believed there.
    """
    layer_types = declared(config, "layer_types")
    kind = layer_types[index] if layer_types else "sliding_attention"
    window = declared(config, "sliding_window") if kind == "sliding_attention" else None
    chunk = declared(config, "attention_chunk_size") if kind == "chunked_attention" else None
    return window, chunk


def declared(config: PreTrainedConfig, name: str) -> Any:
    """None for a name that the class does not know: transformers keeps it, and the model pays no heed to it.

    A Mistral or Qwen that was saved as a Llama has its window in config.json, and full attention.
    """
    known = name in inspect.signature(type(config).__init__).parameters
    return getattr(config, name) if known else None
