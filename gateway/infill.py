"""Tokens for prompts that ask for the middle of a text, between a prefix and a suffix ("fill in the middle")."""

from __future__ import annotations

from gateway.tokenizer import Tokenizer
from outrider.wire.errors import InvalidRequest

INFILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Texts of the three tokens before the prefix, the suffix and the middle, for each known family of models: Qwen and
CodeGemma, StarCoder, SantaCoder, DeepSeek."""


def infill_ids(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the ids of the tokens before the prefix, between prefix and suffix, and after the suffix.

    Raises InvalidRequest if the tokenizer has none of the known families' tokens.
    """
    for texts in INFILL_TOKENS:
        before, between, behind = map(tokenizer.control_id, texts)
        if before is not None and between is not None and behind is not None:
            return before, between, behind
    raise InvalidRequest(
        "suffix is given, and this model's tokenizer has no tokens for filling in the middle; leave it out",
        param="suffix",
    )
