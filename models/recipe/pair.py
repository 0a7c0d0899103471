"""Sizes, folders and token files that preparing, training and measuring the demo pair share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT_LIMIT = 2048
"""Maximum number of tokens of prompt and output together."""
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
SPECIAL_TOKENS = (END_OF_TEXT, "<|user|>", "<|assistant|>", "<|system|>")
TOKENIZER_FOLDER = "tokenizer"

# Both share one head size, so that one attention kernel serves both.
SIZES: dict[str, dict[str, int]] = {
    "target": {  # 11.0M parameters with a vocabulary of 4,096
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "draft": {  # 0.9M
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
}


def new_model(which: str, vocab_size: int) -> LlamaForCausalLM:
    """Return an untrained model, float32 on the CPU. which: "target" or "draft"."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=CONTEXT_LIMIT,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        **SIZES[which],
    )
    return LlamaForCausalLM(config)


def load_model(folder: Path, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """Load a model for inference. Raises FileNotFoundError naming the folder and the command that fills it."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model in {folder}: train it first with `python -m models.recipe.train`")
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval()


def read_ids(path: Path) -> npt.NDArray[np.uint16]:
    """Return the token ids in a file of the corpus (train.bin or val.bin), [num_tokens] uint16, as a memory map.

    Raises FileNotFoundError naming the file and the command that writes it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: write it first with `python -m models.recipe.prepare`")
    return np.memmap(path, dtype=np.uint16, mode="r")


def sample_windows(
    ids: npt.NDArray[np.uint16], num_windows: int, length: int, rng: np.random.Generator
) -> torch.Tensor:
    """Return windows of `length` consecutive tokens at random places, [num_windows, length] int64. A window may reach
    from one text of the corpus into the next.

    Raises ValueError if there are too few ids for a window.
    """
    if len(ids) <= length:
        raise ValueError(f"the part has {len(ids)} tokens, a window needs more than {length}: add text or shorten it")
    starts = rng.integers(0, len(ids) - length, num_windows)
    return torch.from_numpy(np.stack([ids[start : start + length] for start in starts]).astype(np.int64))
