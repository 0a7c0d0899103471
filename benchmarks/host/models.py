"""A target and a draft of one small layer with random weights: their forwards cost little, so the host's part shows."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import DEMO_TARGET, WORK

DTYPE = "bfloat16"
CONTEXT = 2048
"""Tokens."""
LOGIT_STD = 3.5
"""Standard deviation of a position's logits: an entropy of about 2 nats, as text has."""
NOISE = 0.15
"""What the draft's weights differ from the target's, in standard deviations: some of its tokens are accepted."""


def small_pair() -> tuple[Path, Path]:
    """Return the folders of target and draft, made when they are missing: the demo pair's tokenizer and vocabulary."""
    folders = WORK / "host-target", WORK / "host-draft"
    if not all((folder / "tokenizer.json").exists() for folder in folders):
        _create(*folders)
    return folders


def _create(target: Path, draft: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=AutoConfig.from_pretrained(DEMO_TARGET).vocab_size,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=LOGIT_STD / config.hidden_size**0.5)
    for folder in (target, draft):
        model.to(getattr(torch, DTYPE)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(DEMO_TARGET).save_pretrained(folder)
        model = model.float()
        with torch.no_grad():
            for weights in model.parameters():
                weights += NOISE * weights.std() * torch.randn_like(weights)
