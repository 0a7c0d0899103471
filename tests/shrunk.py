"""Shrink the configuration of any class to a tiny one, by rule: each field, by what its name says it counts.

No class is written down here. Of the layers of a class, the first of each kind are kept. Used by
`tests.architectures_table`, which runs every class, and by tests that need one of a kind.
"""

import re
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCAB = 97
WINDOW = 16
"""Tokens of windows and chunks, and of an indexer's choice: contexts of 64 lose keys."""
HEAD = 32
"""Channels of a head: a quarter of them, which some classes rotate, still divides into three sections."""

SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_(size(_per_layer_input)?|offset)", VOCAB),
    (
        r"(t2u_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|model_max_length",
        128,
    ),
    (r"original_max_position_embeddings|floor_scale|log_scaling_n_floor", 32),
    (r".*sliding_window(_size)?|window_size|.*attention_(chunk|window)_size|local_attention(_window_len)?", WINDOW),
    (r"index_topk|indexer_budget|keep_window_size|rel_extent|relative_attention_max_distance", WINDOW),
    (r"index_topk_blocks", 3),
    (r"(index_)?block_size", 4),
    (r"first_k_dense_replace|num_dense_layers|.*_offset|.*start_index|num_nextn_predict_layers", 1),
    (r"relative_attention_num_buckets", 8),
    (r".*(_period|_interval|_frequency|_step|window_pattern|_every_n_layers|layer_group_size)", 2),
    (r".*(experts_per_tok|experts_per_token|moe_top_?k|moe_k|top_k_experts)", 2),
    (r".*n(um)?_shared_experts|topk_group", 1),
    (r".*n(um)?_(routed_|local_)?experts|zero_expert_num", 4),
    (r"n_group|num_expert_group", 2),
    (r"num_decoder_layers|decoder_layers", 3),
    (r"(num_)?(hidden_|encoder_|global_|resampler_)?(layers|blocks|depth)|n_layers?", 2),
    (r"index(er)?_n_heads", 16),  # of fewer, several keys have a score of exactly 0, and which are chosen is chance
    (r"(.*_)?n_groups", 2),
    (r".*(key_value|kv)_(n_)?heads|kv_n_heads", 2),
    (r"(?!.*d_head).*heads?", 4),
    (
        r".*(lora_rank|laurel_rank|norm_rank|lowrank)|hidden_size_per_layer_input|.*(rope|nope)_head_dim|rotary_dim",
        HEAD // 2,
    ),
    (r"v_head_dim", 3 * HEAD // 4),
    (r"mamba_(d_head|head_dim|headdim)", 2 * HEAD),  # 4 of them are twice the width
    (r"mamba_d_ssm", 8 * HEAD),
    (r"vision_feature_layer", 1),
    (r"num_filters", 4),
    (
        r".*(head_(dim|size)|d_head|headdim|d_kv|kv_channels|dim_head|state_size|d_state|head_scalar|attn_scalar)|d_rel",
        HEAD,
    ),
    (r".*(intermediate_size(_mlp)?|ffn?_(hidden_)?(dim|size)|d_?ff|mlp_dim|dim_ff)", HEAD),
    (
        r".*(hidden_size(_global)?|adapter_(in|out|input)_(dim|size)|hidden_dim|d_model|n_embd|embed_?dim|embedding_size|proj_dim|lru_width|output_dim)|dim",
        4 * HEAD,
    ),
)
"""What is left of a number, by its field's name: the first that matches. Smaller ones stay."""
LARGEST = 64
"""What is left of a number whose name says nothing."""
NEEDED = {"head_dim": HEAD, "num_experts_per_tok": 2, "n_routed_experts": 4}
"""Fields without a default that classes compute with nevertheless."""
KEPT = frozenset(
    (
        *("transformers_version", "architectures", "id2label", "label2id", "dtype"),
        *("chunk_size_feed_forward", "acoustic_tokenizer_chunk_size"),
    )
)
"""Fields that say nothing of a class's shape."""
COMPUTED = re.compile(
    r"qk_head_dim|num_layers_per_stack|number_of_.*|.*(idxs?|index(es)?|indices|layer_ids|source_layers)|moe_layers"
)
"""Fields that a class makes from others, or that number layers: left out where they have no default."""
DEPTH = re.compile(r"num_hidden_layers|num_layers|n_layers?|depth")
ENDS = re.compile(r"(bos|eos|pad|decoder_start|forced_eos|forced_bos)_token_id")
TOKEN = re.compile(r".*(_token_id|_token_index|_id)")

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 16}
PUBLISHED: dict[str, dict[str, Any]] = {
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": ROPE}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2}},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [22, 22, 20]}}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "falcon_h1": {"mamba_d_head": 64, "mamba_n_heads": 16},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "nemotron": {"num_key_value_heads": 8},
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "model_args": {"embed_dim": 128}}},
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen3_omni_moe": {"enable_audio_output": False},
    "paddleocr_vl": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [16, 24, 24]}}},
    "qwen4_exp": {"text_config": {**INDEXER, "indexer_compress_ratio": 4}},
    "qwen4_exp_text": {**INDEXER, "indexer_compress_ratio": 4},
    "step3p7": {
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention"],
            "num_hidden_layers": 2,
            "sliding_window": 512,
        }
    },
    "xmod": {"default_language": "en_XX"},
}
"""What checkpoints of a class state and its own default leaves out, without which it does not run."""
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_BLOCKS = ["full_attention", "minimax_m3_sparse"] * 2
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon (ALiBi)": ("falcon", {"alibi": True}),
    "falcon (grouped)": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}),
    "gemma4_text (MoE)": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    ),
    "gemma4_text (shared KV)": ("gemma4_text", {"num_kv_shared_layers": 12}),
    "glm_moe_dsa (shared indexers)": (
        "glm_moe_dsa",
        {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "internvl (qwen3)": ("internvl", {"text_config": {"model_type": "qwen3"}}),
    "laguna (windows)": ("laguna", {"num_hidden_layers": 4, "layer_types": _WINDOWS}),
    "minimax_m3_vl (sparse)": ("minimax_m3_vl", {"text_config": {"num_hidden_layers": 4, "layer_types": _BLOCKS}}),
    "minimax_m3_vl_text (sparse)": ("minimax_m3_vl_text", {"num_hidden_layers": 4, "layer_types": _BLOCKS}),
    "mistral3 (ministral3)": ("mistral3", {"text_config": {"model_type": "ministral3"}}),
    "mistral3 (mistral4)": ("mistral3", {"text_config": {"model_type": "mistral4"}}),
    "qwen2 (windows)": ("qwen2", {"use_sliding_window": True, "max_window_layers": 16}),
}
"""What checkpoints of a class state that keep or compute something else than its default: rows of their own."""


def shrunk(model_type: str, **stated: Any) -> PreTrainedConfig:
    """Return the tiny configuration of a class. stated: fields of its configuration that are not its default."""
    return shrink(CONFIG_MAPPING[model_type](**{**PUBLISHED.get(model_type, {}), **stated}))


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a new configuration of the same class, of a few layers and 128 channels."""
    values = stated_fields(config)
    depth = next((value for name, value in values.items() if DEPTH.fullmatch(name) and type(value) is int), 0)
    layers = layers_of_each_kind(values, depth)
    special_ids = iter(range(VOCAB - 1, 0, -1))
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = shrink(value)
        elif ENDS.fullmatch(name) and value is not None:
            small[name] = 0
        elif TOKEN.fullmatch(name) and type(value) is int and value >= 0:
            small[name] = next(special_ids)
        elif "rope" in name and isinstance(value, dict):
            small[name] = shrink_rope(value, type(config))
        elif name == "per_layer_config":
            small[name] = shrink_layers(value, values, layers)
        elif layers and DEPTH.fullmatch(name) and value == depth:
            small[name] = len(layers)
        elif layers and isinstance(value, list | tuple) and len(value) == depth:
            small[name] = [shrink_value(name, value[layer]) for layer in layers]
        else:
            small[name] = shrink_value(name, value)
    if num_shared := values.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = sum(layer >= depth - num_shared for layer in layers)
    return type(config)(**consistent(small, values, config))


def stated_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that make a configuration, without those that its class makes from others."""
    values: dict[str, Any] = {}
    for field in fields(type(config)):
        is_computed = COMPUTED.fullmatch(field.name) and field.default is None
        if field.init and field.name not in KEPT and not is_computed:
            values[field.name] = vars(config).get(field.name, field.default)
    for name in ("rope_theta", "hidden_size"):  # of the few classes that have no field for it
        if name in vars(config):
            values[name] = vars(config)[name]
    if by_layer := config.to_dict().get("per_layer_config"):
        values["per_layer_config"] = by_layer
    return values


def consistent(small: dict[str, Any], values: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the small fields with what a class demands of several of them together."""
    for name, size in NEEDED.items():
        if name in small and small[name] is None:
            small[name] = size
    num_heads = values.get("num_attention_heads")
    if num_heads is not None and values.get("num_key_value_heads") == num_heads:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if values.get("head_dim") is not None and values["head_dim"] == values.get("qk_rope_head_dim"):
        small["head_dim"] = small["qk_rope_head_dim"]
    if "expand" in small and "num_heads" in small:
        small["head_dim"] = small["expand"] * small["hidden_size"] // small["num_heads"]
    if config.is_encoder_decoder:
        small["decoder_start_token_id"] = 0
    if "is_decoder" in small and not config.is_encoder_decoder:
        small["is_decoder"] = True
    return small


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
    if not depth or not (by_layer or num_shared):
        return []
    first: dict[tuple[Any, ...], int] = {}
    for layer in range(depth):
        kind = (*(str(value[layer]) for value in by_layer), layer >= depth - num_shared)
        first.setdefault(kind, layer)
    return sorted(first.values()) if len(first) > 1 else [0, depth - 1]


def shrink_layers(by_layer: dict[int, dict[str, Any]], values: dict[str, Any], layers: list[int]) -> dict[int, Any]:
    """Return what single layers have otherwise, in the proportion that they have it to the rest."""
    small: dict[int, Any] = {}
    for new, old in enumerate(layers):
        for name, value in by_layer.get(old, {}).items():
            base = values.get(name)
            is_size = type(value) is int and type(base) is int
            size = shrink_value(name, base) * value // base if is_size else shrink_value(name, value)
            small.setdefault(new, {})[name] = size
    return small


def shrink_rope(rope: dict[str, Any], config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return rotary parameters of a context that ends early, in sections where the class has sections."""
    small: dict[str, Any] = {}
    for name, value in rope.items():
        small[name] = shrink_rope(value, config_class) if isinstance(value, dict) else shrink_value(name, value)
    has_sections = "mrope_section" in rope or "mrope_section" in config_class.ignore_keys_at_rope_validation
    if has_sections and "rope_type" in rope:
        sections = rope.get("mrope_section", [24, 20, 20])
        num_pairs = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
        first, second = (section * num_pairs // sum(sections) for section in sections[:2])
        small["mrope_section"] = [first, second, num_pairs - first - second]
    return small
