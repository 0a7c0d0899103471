"""Tiny random models with a tokenizer of exactly their vocabulary, written to a folder, for every test that needs one.

The weights are random but scaled up, so that logits differ by more than rounding and top-2 gaps are real.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tests.zoo import zoo

__all__ = ["EOS_ID", "UNKNOWN_ID", "perturbed_copy", "random_model", "save", "tiny_llama", "write_tokenizer", "zoo"]

EOS_ID = 0
UNKNOWN_ID = 1


def tiny_llama(
    path: Path | str,
    vocab_size: int = 320,
    seed: int = 0,
    *,
    hidden_size: int = 32,
    num_layers: int = 2,
    context: int = 256,
    sharpness: float = 1.0,
) -> str:
    """Write a Llama of about 40k parameters and its tokenizer; returns the folder.

    sharpness scales the logits: 1 gives a probability of the best token around a few per cent above uniform, 4 a
    peaked distribution. Two seeds share nothing, so a draft of another seed is accepted only by chance.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    model = random_model(config, seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    return save(model, path)


def perturbed_copy(source: str, path: Path | str, noise: float, seed: int = 1) -> str:
    """A draft for the model in `source`: its weights with relative Gaussian noise, so that acceptance is partial."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread * noise)
    return save(model, path)


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Eval mode, float32. The global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 0.7 / parameter.shape[-1] ** 0.5 if "embed" not in name else 0.7)
    return model.eval().requires_grad_(False)


def save(model: PreTrainedModel, path: Path | str) -> str:
    """Weights, configuration and tokenizer, as the loader wants them."""
    disable_progress_bar()
    model.save_pretrained(path)
    write_tokenizer(path, model.config.get_text_config().vocab_size)
    return str(path)


def write_tokenizer(path: Path | str, vocab_size: int) -> None:
    """tokenizer.json with ids 0 to vocab_size - 1: byte-level from 258 on, below that words t2, t3, ... by spaces."""
    Path(path).mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_level(vocab_size) if vocab_size >= 258 else _words(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    tokenizer.save(str(Path(path) / "tokenizer.json"))
    (Path(path) / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "</s>", "unk_token": "<unk>"}'
    )


def _byte_level(vocab_size: int) -> Tokenizer:
    """256 bytes, two special tokens, and pairs of characters up to the size."""
    vocab = {"</s>": EOS_ID, "<unk>": UNKNOWN_ID}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    letters = string.ascii_lowercase + string.ascii_uppercase + string.digits + "Ġ.,"
    merges = [(a, b) for a in letters for b in letters][: vocab_size - len(vocab)]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer)
    return tokenizer


def _words(vocab_size: int) -> Tokenizer:
    vocab = {"</s>": EOS_ID, "<unk>": UNKNOWN_ID, **{f"t{i}": i for i in range(2, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _add_special(tokenizer)
    return tokenizer


def _add_special(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<unk>", special=True)])
