"""Sizes, tokenizer and batches that training and measuring the translation pair share."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from models.translation.grammar import SentenceGrammar
from models.translation.lexicon import Lexicon

PAD = "<pad>"
END = "</s>"
PAD_ID = 0
END_ID = 1
"""Id of the token that ends each text. PAD_ID begins the decoder's output, as in T5."""
VOCAB_SIZE = 2048
"""Number of tokens of the tokenizer. With twice as many, whole words of the lexicon would be tokens, so that no word
would be spelt in pieces."""
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_SENTENCES = 20_000
"""Number of sentences of each language on which the tokenizer is trained."""
TEXT_SENTENCES = 4_000
"""Number of sentences of De in the text for drafters that count n-grams. With twice as many, bigrams are right a little
more often."""
HELD_OUT_ONE_IN = 64
POOL_BATCHES = 16
"""Number of batches whose pairs are sorted by length together. More batches need less padding, but then the sentences
of one batch are more alike."""

SIZES: dict[str, dict[str, int]] = {
    "teacher": {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 512, "num_layers": 4},  # 5.8M parameters
    "target": {"d_model": 128, "d_kv": 64, "num_heads": 2, "d_ff": 320, "num_layers": 2},  # 1.0M
    "draft": {"d_model": 96, "d_kv": 48, "num_heads": 2, "d_ff": 384, "num_layers": 1},  # 0.5M
}
"""T5 settings of each model. `num_layers` holds for the encoder and for the decoder."""


def new_model(which: str) -> T5ForConditionalGeneration:
    """Return an untrained model, float32 on the CPU. which: a key of SIZES."""
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        dropout_rate=0.0,  # no pair is seen twice
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        decoder_start_token_id=PAD_ID,
        **SIZES[which],
    )
    return T5ForConditionalGeneration(config)


def load_model(folder: Path, device: str) -> T5ForConditionalGeneration:
    """Load a model for inference, float32. Raises FileNotFoundError naming the folder and the command that fills it."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model in {folder}: train it first with `python -m models.translation.train`")
    model: T5ForConditionalGeneration = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()


def make_tokenizer(grammar: SentenceGrammar) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on both languages, that ends every text with END."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = byte_level
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    pairs = itertools.islice(training_pairs(grammar, 0), TOKENIZER_SENTENCES)
    bpe.train_from_iterator(itertools.chain.from_iterable(pairs), trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, END_ID)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)


def make_grammar() -> SentenceGrammar:
    return SentenceGrammar(Lexicon.make())


def is_held_out(source: str) -> bool:
    return zlib.crc32(source.encode()) % HELD_OUT_ONE_IN == 0


def training_pairs(grammar: SentenceGrammar, seed: int) -> Iterator[tuple[str, str]]:
    """Yield pairs (sentence of En, translation) without end. None of them is held out."""
    return (pair for pair in grammar.pairs(seed) if not is_held_out(pair[0]))


def held_out_pairs(grammar: SentenceGrammar) -> Iterator[tuple[str, str]]:
    """Yield the pairs (sentence of En, translation) that no model is trained on, without end and always the same."""
    return (pair for pair in grammar.pairs(0) if is_held_out(pair[0]))


def text_to_count_in(grammar: SentenceGrammar) -> str:
    """Return sentences of De, one after the other, for drafters that count n-grams. None is a held-out translation."""
    return " ".join(target for _, target in itertools.islice(training_pairs(grammar, 0), TEXT_SENTENCES))


def batches(
    pairs: Iterator[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, batch_size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield sources [B, S] int64 and targets [B, T] int64 without end. Each row ends with END_ID and is padded with
    PAD_ID.

    Rows of about the same length are in one batch. The batches come in random order.
    """
    order = np.random.default_rng(seed)
    while pool := list(itertools.islice(pairs, POOL_BATCHES * batch_size)):
        source_ids = tokenizer([source for source, _ in pool])["input_ids"]
        target_ids = tokenizer([target for _, target in pool])["input_ids"]
        lengths = np.array([max(map(len, both)) for both in zip(source_ids, target_ids, strict=True)])
        by_length = np.argsort(lengths, kind="stable")
        for start in order.permutation(np.arange(0, len(pool), batch_size)):
            rows = by_length[start : start + batch_size]
            sources = _padded([source_ids[row] for row in rows])
            targets = _padded([target_ids[row] for row in rows])
            yield sources, targets


def _padded(rows: list[list[int]]) -> torch.Tensor:
    padded = np.full((len(rows), max(map(len, rows))), PAD_ID, dtype=np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)
