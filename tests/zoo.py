"""Pieces of tiny configurations, for tests that need a shape of their own; whole ones are `tests.shrunk`.

Sliding windows are 16 tokens, so that contexts above 40 lose keys.
"""

from typing import Any

COMMON: dict[str, Any] = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SHAPE: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WINDOW: dict[str, Any] = {"sliding_window": 16}
HEAD: dict[str, Any] = {"head_dim": 8}
MIXED: dict[str, Any] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
