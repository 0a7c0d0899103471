"""Prompts that ask for the middle of a text: in the tokens that a model was trained with for it, prefix first."""

from __future__ import annotations

from gateway.tokenizer import Tokenizer
from outrider.wire.errors import InvalidRequest

FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""What stands before the prefix, before the suffix and before the middle: Qwen's and CodeGemma's, StarCoder's,
SantaCoder's and DeepSeek's."""


def infill_ids(prefix: str, suffix: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the prompt. Raises InvalidRequest for a tokenizer without such tokens."""
    for form in FORMS:
        before, between, behind = map(tokenizer.control_id, form)
        if before is not None and between is not None and behind is not None:
            begin = tokenizer.encode("")  # what the tokenizer puts in front of every text
            first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix))
            return (*begin, before, *first, between, *last, behind)
    raise InvalidRequest(
        "suffix is given, and this model's tokenizer has no tokens for filling in the middle; leave it out",
        param="suffix",
    )
