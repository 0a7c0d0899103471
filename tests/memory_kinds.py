"""Tiny models of every kind of memory that a layer may have, loud enough that a wrong token of it shows.

Used by tests of the engine and, with drafts of their own, by those over services.
"""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.zoo import EXPERTS, HEAD, LATENT, MIXED, ROUTED, SHAPE, WINDOW

INDEX: dict[str, Any] = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 16}
"""Of a few tokens most are left out. With many heads no two scores are equal: which of two is taken would be chance."""
FOUR: dict[str, Any] = {"num_hidden_layers": 4}
SHARED: dict[str, Any] = {
    **FOUR,
    **HEAD,
    **WINDOW,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
}
BLOCKS: dict[str, Any] = {
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
}
HYBRID: dict[str, Any] = {
    **HEAD,
    **WINDOW,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "logits_mup_width_multiplier": 1.0,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "layer_types": ["hybrid", "hybrid_sliding"],
}
CONVOLUTIONS: dict[str, Any] = {**FOUR, "layer_types": ["conv", "full_attention"] * 2}
_ALL: dict[str, tuple[str, dict[str, Any]]] = {
    "indexer": ("deepseek_v32", {**LATENT, **ROUTED, **INDEX}),
    "shared indexer": ("glm_moe_dsa", {**LATENT, **ROUTED, **INDEX, **FOUR, "indexer_types": ["full", "shared"] * 2}),
    "block indexer": ("minimax_m3_vl_text", {**EXPERTS, **BLOCKS, "head_dim": 16}),
    "convolution": ("lfm2", CONVOLUTIONS),
    "convolution and window": (
        "lfm3",
        {**FOUR, **HEAD, **WINDOW, "layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
    ),
    "convolutions beside attention": ("inkling_text", HYBRID),
    "window": ("gemma3_text", {**HEAD, **MIXED, "query_pre_attn_scalar": 8}),
    "wrapper": ("gemma3", {**HEAD, **MIXED, "query_pre_attn_scalar": 8}),
    "latent": ("deepseek_v3", {**LATENT, **ROUTED}),
    "sinks": ("gpt_oss", {**HEAD, **EXPERTS, **MIXED}),
    "experts": ("mixtral", {**EXPERTS, "sliding_window": None}),
    "shared keys and values": ("gemma4_text", {**SHARED, "global_head_dim": 16}),
    "another class's shared ones": ("gemma3n_text", {**SHARED, "laurel_rank": 8, "altup_num_inputs": 2}),
}
SHAPES = {kind: shape for kind, shape in _ALL.items() if shape[0] in CONFIG_MAPPING}  # an old transformers lacks some
"""By what is special about the memory: transformers' name of the class, and the configuration of its text part."""
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def config_of(kind: str, vocab_size: int = 97, **changes: Any) -> PreTrainedConfig:
    """Return the configuration. changes: of its values."""
    model_type, shape = SHAPES[kind]
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "tie_word_embeddings": False}  # tied, a model repeats itself
    if "hidden_size_per_layer_input" in shape:
        sizes["vocab_size_per_layer_input"] = vocab_size
    values = {**SHAPE, **shape, **sizes, **changes}
    if kind == "wrapper":
        ends = {"eos_token_id": 0, "tie_word_embeddings": False}
        return CONFIG_MAPPING[model_type](text_config=values, vision_config=VISION, mm_tokens_per_image=4, **ends)
    return CONFIG_MAPPING[model_type](**values)
