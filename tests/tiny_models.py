"""Tiny random models with a tokenizer of exactly their vocabulary, written to a folder, for every test that needs one.

The weights are random but scaled up, so that logits differ by more than rounding and top-2 gaps are real.
"""

import string
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.utils.logging import disable_progress_bar

from outrider.engine.loading.loader import keep_soft_caps

__all__ = [
    "EOS_ID",
    "START_ID",
    "UNKNOWN_ID",
    "perturbed_copy",
    "random_model",
    "save",
    "tiny_bart",
    "tiny_llama",
    "tiny_t5",
    "write_tokenizer",
]

EOS_ID = 0
UNKNOWN_ID = START_ID = 1
"""Answers of encoder-decoder models begin with it: as in T5's, no id of its own."""

_ENDS = {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}


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


def tiny_t5(
    path: Path | str, vocab_size: int = 320, seed: int = 0, *, num_layers: int = 2, sharpness: float = 8.0
) -> str:
    """Write a T5 of about 60k parameters and its tokenizer, which ends a source with </s>; returns the folder.

    sharpness: as of `tiny_llama`, where the same weights give a flatter distribution.
    """
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": num_layers}
    config = T5Config(vocab_size=vocab_size, decoder_start_token_id=START_ID, **sizes, **_ENDS)
    model = random_model(config, seed)
    _make_eventful(model, model.decoder.final_layer_norm.weight, sharpness)
    return save(model, path)


def tiny_bart(path: Path | str, vocab_size: int = 320, seed: int = 0) -> str:
    """Write a BART as `tiny_t5` does a T5. What its generation forces to come first is the token after the start."""
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "max_position_embeddings": 128}
    config = BartConfig(
        vocab_size=vocab_size, decoder_start_token_id=START_ID, forced_eos_token_id=None, **layers, **heads, **_ENDS
    )
    model = random_model(config, seed)
    _make_eventful(model, model.model.decoder.layers[-1].final_layer_norm.weight, 1.0)
    model.generation_config.forced_bos_token_id = START_ID + 1
    return save(model, path)


_SCALED = {"EncDecAttention.o": 3.0, "encoder_attn.out_proj": 3.0, "SelfAttention.o": 6.0, "attention_bias": 4.0}
"""Parts whose weights are scaled, by their names."""


def _make_eventful(model: PreTrainedModel, last_norm: torch.Tensor, sharpness: float) -> None:
    """Let what comes next depend on source, position and the tokens before, and not be the last of them, though
    embedding and head are one. last_norm: the weight [hidden] of the norm before the head.
    """
    generator = torch.Generator().manual_seed(last_norm.numel())
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8.0)
        last_norm.mul_(sharpness / 8.0 * (torch.randint(2, last_norm.shape, generator=generator) * 2.0 - 1.0))
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(next((scale for part, scale in _SCALED.items() if part in name), 1.0))


def perturbed_copy(source: str, path: Path | str, noise: float, seed: int = 1) -> str:
    """A draft for the model in `source`: its weights with relative Gaussian noise, so that acceptance is partial."""
    auto = AutoModelForSeq2SeqLM if AutoConfig.from_pretrained(source).is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread * noise)
    return save(model, path)


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Eval mode, float32. The global generator is left as it was."""
    keep_soft_caps(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = class_of(config)._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 0.7 / parameter.shape[-1] ** 0.5 if "embed" not in name else 0.7)
    return model.eval().requires_grad_(False)


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that a checkpoint of such a configuration states: the widest that writes text."""
    for auto in (AutoModelForMultimodalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForCausalLM):
        found: type[PreTrainedModel] | None = auto._model_mapping.get(type(config), None)
        if found is not None:
            return found
    raise ValueError(f"{type(config).__name__} has no class that writes text")


def save(model: PreTrainedModel, path: Path | str) -> str:
    """Weights, configuration and tokenizer, as the loader wants them."""
    disable_progress_bar()
    model.save_pretrained(path)
    write_tokenizer(path, model.config.get_text_config().vocab_size, ends=model.config.is_encoder_decoder)
    return str(path)


def write_tokenizer(path: Path | str, vocab_size: int, *, ends: bool = False) -> None:
    """tokenizer.json with ids 0 to vocab_size - 1: byte-level from 258 on, below that words t2, t3, ... by spaces.

    ends: a text ends with </s>.
    """
    Path(path).mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_level(vocab_size) if vocab_size >= 258 else _words(vocab_size)
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS_ID)])
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
