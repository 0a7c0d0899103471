"""Shrink the configuration of any class to a tiny one, by rule: each field, by what its name says it counts.

No class is written down here. Of the layers of a class, the first of each kind are kept. Used by
`tests.architectures_table`, which runs every class, and by tests that need one of a kind.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCAB = 97
WINDOW = 16
"""Tokens of windows and chunks, and of an indexer's choice: contexts of 64 lose keys."""
HEAD = 32
"""Channels of a head: a quarter of them, which some classes rotate, still divides into three sections."""

SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size(_per_layer_input)?", VOCAB),
    (r"(t2u_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|model_max_length", 128),
    (r"original_max_position_embeddings|floor_scale|log_scaling_n_floor", 32),
    (r".*sliding_window(_size)?|window_size|.*attention_(chunk|window)_size|local_attention(_window_len)?", WINDOW),
    (r"index_topk|indexer_budget|keep_window_size|rel_extent|relative_attention_max_distance", WINDOW),
    (r"index_topk_blocks", 3),
    (r"(index_)?block_size", 4),
    (r"first_k_dense_replace|num_dense_layers|.*_offset|.*start_index|num_nextn_predict_layers", 1),
    (r".*(_period|_interval|_frequency|_step|window_pattern|_every_n_layers|layer_group_size)", 2),
    (r".*(experts_per_tok|experts_per_token|moe_top_?k|moe_k|top_k_experts)", 2),
    (r".*n(um)?_shared_experts|topk_group", 1),
    (r".*n(um)?_(routed_|local_)?experts|zero_expert_num", 4),
    (r"n_group|num_expert_group", 2),
    (r"num_decoder_layers|decoder_layers", 3),
    (r"(num_)?(hidden_|encoder_|global_|resampler_)?(layers|blocks|depth)|n_layers?", 2),
    (r".*heads?", 4),
    (r".*(lora_rank|laurel_rank|norm_rank|lowrank)|hidden_size_per_layer_input|.*rope_head_dim|rotary_dim", HEAD // 2),
    (r".*(head_(dim|size)|d_head|d_kv|kv_channels|dim_head|state_size|d_state|head_scalar|attn_scalar)|d_rel", HEAD),
    (r".*(intermediate_size(_mlp)?|ffn?_(hidden_)?(dim|size)|d_?ff|mlp_dim|dim_ff)", 96),
    (r".*(hidden_size|hidden_dim|d_model|n_embd|embed_?dim|embedding_size|proj_dim|lru_width|output_dim)|dim", 4 * HEAD),
)
"""What is left of a number, by its field's name: the first that matches. Smaller ones stay."""
LARGEST = 64
"""What is left of a number whose name says nothing."""
KEPT = frozenset(["transformers_version", "architectures", "id2label", "label2id", "dtype", "chunk_size_feed_forward"])
"""Fields of every class that say nothing of its shape."""
DEPTH = re.compile(r"num_hidden_layers|num_layers|n_layers?|depth")
COMPUTED = re.compile(r"qk_head_dim|num_layers_per_stack|number_of_.*|.*(idxs?|index(es)?|indices|layer_ids)|moe_layers")
"""Fields that a class makes from others, or that number layers."""
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
TOKEN = re.compile(r".*(_token_ids?|_token_index|_id)")


def shrunk(model_type: str, **published: Any) -> PreTrainedConfig:
    """Return the tiny configuration of a class. published: fields in which its checkpoints differ from its default."""
    return shrink(CONFIG_MAPPING[model_type](**published))


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a new configuration of the same class, of a few layers and 128 channels."""
    values: dict[str, Any] = {}
    for field in fields(type(config)):
        is_computed = COMPUTED.fullmatch(field.name) and field.default is None
        if field.init and field.name not in KEPT and not is_computed:
            values[field.name] = getattr(config, field.name)
    depth = next((values[name] for name in values if DEPTH.fullmatch(name) and isinstance(values[name], int)), 0)
    layers = layers_of_each_kind(values, depth)
    special_ids = iter(range(VOCAB - 1, 0, -1))
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            values[name] = shrink(value)
        elif name in ENDS:
            values[name] = None if value is None else 0
        elif TOKEN.fullmatch(name):
            values[name] = next(special_ids) if isinstance(value, int) and value >= 0 else value
        elif "rope" in name and isinstance(value, dict):
            values[name] = shrink_rope(value, type(config))
        elif layers and DEPTH.fullmatch(name) and value == depth:
            values[name] = len(layers)
        elif layers and isinstance(value, list | tuple) and len(value) == depth:
            values[name] = type(value)(shrink_value(name, value[layer]) for layer in layers)
        else:
            values[name] = shrink_value(name, value)
    small_heads = next((values[name] for name in ("num_attention_heads", "n_heads") if name in values), None)
    return type(config)(**values)


def shrink_value(name: str, value: Any) -> Any:
    """Return what the rule leaves of a field's value; lists keep their form."""
    if isinstance(value, list | tuple):
        return type(value)(shrink_value(name, one) for one in value)
    if type(value) is not int:
        return value
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), LARGEST)
    return min(value, size)


def layers_of_each_kind(values: dict[str, Any], depth: int) -> list[int]:
    """Return the first layer of each kind, by all fields that say something of each layer; none where no field does.

    A layer that reads the KV of an earlier one is of another kind than that.
    """
    by_layer = [value for value in values.values() if isinstance(value, list | tuple) and len(value) == depth]
    num_shared = values.get("num_kv_shared_layers") or 0
    if not by_layer and not num_shared or not depth:
        return []
    first: dict[tuple[Any, ...], int] = {}
    for layer in range(depth):
        kind = (*(str(value[layer]) for value in by_layer), layer >= depth - num_shared)
        first.setdefault(kind, layer)
    return sorted(first.values()) if len(first) > 1 else [0, depth - 1]


def shrink_rope(rope: dict[str, Any], config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return rotary parameters of a context that ends early, in sections where the class has sections."""
    small: dict[str, Any] = {}
    for name, value in rope.items():
        small[name] = shrink_rope(value, config_class) if isinstance(value, dict) else shrink_value(name, value)
    if "mrope_section" in config_class.ignore_keys_at_rope_validation and "rope_type" in rope:
        pairs = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
        small["mrope_section"] = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
    return small
