"""A tiny configuration of every architecture that the paths are tested on, with the trait that makes it a case.

Sliding windows are 16 tokens and chunks 16, so that contexts above 40 lose keys. Used by tests of the engine and by
`tests.architectures_table`, which writes docs/architectures.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

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
SOFTCAP: dict[str, Any] = {"attn_logit_softcapping": 1.0}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MANY_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
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
GPT: dict[str, Any] = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
T5: dict[str, Any] = {
    **COMMON,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    **COMMON,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 0,
}
DBRX: dict[str, Any] = {
    **COMMON,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 128,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
}
GPT_NEO: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "window_size": 16,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 128,
}
LLAMA4: dict[str, Any] = {
    **SHAPE,
    **HEAD,
    **EXPERTS,
    "intermediate_size_mlp": 48,
    "attention_chunk_size": 16,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}
MANY_HEADS = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of docs/architectures.md."""

    model_type: str
    """transformers' own name."""
    shape: dict[str, Any]
    notes: str = ""
    """What is special about its attention or its layers."""

    @property
    def config(self) -> PreTrainedConfig:
        return CONFIG_MAPPING[self.model_type](**self.shape)


def _architectures() -> dict[str, Architecture]:
    one = Architecture
    return {
        "apertus": one("apertus", SHAPE),
        "arcee": one("arcee", SHAPE),
        "biogpt": one("biogpt", MANY_HEADS, "learned positions"),
        "bloom": one("bloom", {**COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi"),
        "codegen": one("codegen", {**GPT, "rotary_dim": 4}),
        "cohere": one("cohere", SHAPE),
        "cohere2": one("cohere2", {**SHAPE, **MIXED}, "window on every other layer"),
        "dbrx": one("dbrx", DBRX, "MoE"),
        "deepseek_v2": one("deepseek_v2", {**SHAPE, **LATENT, **ROUTED, "topk_method": "greedy"}, "MLA, MoE"),
        "deepseek_v3": one("deepseek_v3", {**SHAPE, **LATENT, **ROUTED}, "MLA, MoE"),
        "ernie4_5": one("ernie4_5", {**SHAPE, **HEAD}),
        "exaone4": one("exaone4", {**SHAPE, **MIXED}, "window on every other layer"),
        "falcon": one("falcon", {**MANY_HEADS, "new_decoder_architecture": True, "num_kv_heads": 2}),
        "falcon (alibi)": one("falcon", {**MANY_HEADS, "alibi": True}, "ALiBi"),
        "gemma": one("gemma", {**SHAPE, **HEAD}),
        "gemma2": one(
            "gemma2",
            {**SHAPE, **HEAD, **WINDOW, "query_pre_attn_scalar": 8, **SOFTCAP},
            "soft cap, window on every other layer",
        ),
        "gemma3_text": one(
            "gemma3_text", {**SHAPE, **HEAD, **MIXED, "query_pre_attn_scalar": 8}, "window on most layers"
        ),
        "bart": one("bart", BART, "encoder-decoder, learned positions"),
        "blenderbot": one("blenderbot", BART, "encoder-decoder, learned positions"),
        "longt5": one("longt5", T5, "encoder-decoder, relative positions"),
        "marian": one("marian", BART, "encoder-decoder, sinusoidal positions"),
        "mbart": one("mbart", BART, "encoder-decoder, learned positions"),
        "mt5": one("mt5", T5, "encoder-decoder, relative positions"),
        "mvp": one("mvp", BART, "encoder-decoder, learned positions"),
        "pegasus": one("pegasus", BART, "encoder-decoder, sinusoidal positions"),
        "plbart": one("plbart", BART, "encoder-decoder, learned positions"),
        "t5": one("t5", T5, "encoder-decoder, relative positions"),
        "umt5": one("umt5", T5, "encoder-decoder, relative positions of each layer"),
        "glm": one("glm", {**SHAPE, **HEAD}),
        "glm4": one("glm4", {**SHAPE, **HEAD}),
        "glm4_moe": one("glm4_moe", {**SHAPE, **HEAD, **ROUTED}, "MoE"),
        "gpt2": one("gpt2", GPT, "learned positions"),
        "gpt_bigcode": one("gpt_bigcode", GPT, "learned positions, one KV head"),
        "gpt_neo": one("gpt_neo", GPT_NEO, "learned positions, window on every other layer"),
        "gpt_neox": one("gpt_neox", MANY_HEADS),
        "gpt_oss": one("gpt_oss", {**SHAPE, **HEAD, **EXPERTS, **MIXED}, "sinks, MoE, window on every other layer"),
        "gptj": one("gptj", {**GPT, "rotary_dim": 4}),
        "granite": one("granite", SHAPE),
        "granitemoe": one("granitemoe", {**SHAPE, **EXPERTS}, "MoE"),
        "helium": one("helium", {**SHAPE, **HEAD}),
        "llama": one("llama", SHAPE),
        "llama4_text": one("llama4_text", LLAMA4, "chunks, MoE, layers without positions"),
        "ministral": one("ministral", {**SHAPE, **HEAD, **MIXED}, "window on some layers"),
        "mistral": one("mistral", {**SHAPE, **WINDOW}, "window"),
        "mixtral": one("mixtral", {**SHAPE, **EXPERTS, "sliding_window": None}, "MoE"),
        "mpt": one("mpt", {**COMMON, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, "ALiBi"),
        "nemotron": one("nemotron", SHAPE),
        "olmo": one("olmo", SHAPE),
        "olmo2": one("olmo2", SHAPE),
        "olmo3": one("olmo3", {**SHAPE, **MIXED}, "window on most layers"),
        "olmoe": one("olmoe", {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2}, "MoE"),
        "opt": one("opt", {**MANY_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32}, "learned positions"),
        "persimmon": one("persimmon", MANY_HEADS),
        "phi": one("phi", SHAPE),
        "phi3": one("phi3", {**SHAPE, **WINDOW}, "window"),
        "phimoe": one("phimoe", {**SHAPE, **EXPERTS, **WINDOW}, "MoE, window"),
        "qwen2": one("qwen2", SHAPE),
        "qwen2_moe": one(
            "qwen2_moe",
            {**SHAPE, **MANY_EXPERTS, **WINDOW, "use_sliding_window": True, "max_window_layers": 1},
            "MoE, window on some layers",
        ),
        "qwen3": one("qwen3", {**SHAPE, **HEAD}),
        "qwen3_moe": one("qwen3_moe", {**SHAPE, **HEAD, **MANY_EXPERTS}, "MoE"),
        "seed_oss": one("seed_oss", {**SHAPE, **HEAD}),
        "smollm3": one("smollm3", {**SHAPE, "no_rope_layers": [1, 0]}, "layers without positions"),
        "stablelm": one("stablelm", SHAPE),
        "starcoder2": one("starcoder2", {**SHAPE, **WINDOW}, "window"),
        "vaultgemma": one(
            "vaultgemma", {**SHAPE, **HEAD, **WINDOW, "query_pre_attn_scalar": 8, **SOFTCAP}, "soft cap, window"
        ),
        "xglm": one(
            "xglm",
            {**COMMON, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}
            | {"max_position_embeddings": 128},
            "sinusoidal positions",
        ),
    }


ARCHITECTURES: dict[str, Architecture] = _architectures()
"""By the name in the table."""


def zoo() -> dict[str, PreTrainedConfig]:
    """A tiny configuration per architecture, by name."""
    return {name: architecture.config for name, architecture in ARCHITECTURES.items()}
