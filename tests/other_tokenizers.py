"""Tokenizers of several families: what a draft may translate from."""

import json
from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "def main():\n    return 'the wörld is wide: naïve café, Straße, Привет мир, 日本語の文章'\n\n"
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize  # 1234 and 99\n\n\n"
    "x = [i ** 2 for i in range(1000) if i % 7 == 3]\nprint(f'{x!r}: the other and the rest', 3.14159)\t😀 end\n"
)


@lru_cache(maxsize=8)
def byte_level(size: int = 420, special: tuple[str, ...] = ("<|endoftext|>", "<s>"), begin: str = "") -> Tokenizer:
    """Byte-level BPE that parts words as GPT-2 does. begin: the special token that texts begin with."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, special.index(begin))]
        )
    return _trained(tokenizer, size, special, pre_tokenizers.ByteLevel.alphabet())


@lru_cache(maxsize=8)
def digits_apart(size: int = 380, special: tuple[str, ...] = ("<pad>", "<|im_end|>")) -> Tokenizer:
    """Byte-level BPE of another pre-tokeniser: single digits, words without the space before them."""
    tokenizer = Tokenizer(models.BPE())
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split(Regex(r"[_ ]|\s+"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, size, special, pre_tokenizers.ByteLevel.alphabet())


@lru_cache(maxsize=8)
def sentencepiece(size: int = 480, *, prefix: bool = True) -> Tokenizer:
    """BPE with byte fallback as Llama 2's: spaces are ▁, and one is put before a text."""
    special = ("<unk>", "<s>", "</s>")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fallbacks = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = _trained(tokenizer, size, (*special, *fallbacks), [])
    document = json.loads(trained.to_str())
    document["added_tokens"] = [each for each in document["added_tokens"] if each["content"] not in fallbacks]
    return Tokenizer.from_str(json.dumps(document))


def _trained(tokenizer: Tokenizer, size: int, special: tuple[str, ...], alphabet: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        initial_alphabet=alphabet,
        special_tokens=[AddedToken(each, special=True) for each in special],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 2, trainer)
    return tokenizer


def json_of(tokenizer: Tokenizer) -> bytes:
    return tokenizer.to_str().encode()
