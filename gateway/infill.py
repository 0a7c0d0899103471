"""Prompts that ask for the middle of a text, in the tokens with which a model was trained for it, prefix first."""

from __future__ import annotations

from gateway.tokenizer import Tokenizer
from outrider.wire.errors import InvalidRequest

FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Tokens before the prefix, before the suffix and before the middle: Qwen's and CodeGemma's, StarCoder's, SantaCoder's
and DeepSeek's."""


def infill_marks(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the ids of the tokens before the prefix, between prefix and suffix, and behind the suffix.

    Raises InvalidRequest if the tokenizer has no such tokens.
    """
    for form in FORMS:
        before, between, behind = map(tokenizer.control_id, form)
        if before is not None and between is not None and behind is not None:
            return before, between, behind
    raise InvalidRequest(
        "suffix is given, and this model's tokenizer has no tokens for filling in the middle; leave it out",
        param="suffix",
    )
