"""Keyword arguments of `generate` and `stream`, and the check of their names and types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, get_type_hints

from outrider.client.types import Speculation, StructuredOutputs
from outrider.wire.errors import InvalidRequest


class Message(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`, all optional. An absent sampling parameter has its default in
    `SamplingParams`.
    """

    prompt_ids: Sequence[int]
    """Prompt as token ids, in place of a text."""
    messages: Sequence[Message]
    """Prompt as a chat, in place of a text; the gateway applies the model's chat template."""
    model: str
    """Id of the served model to use; may be absent if the gateway serves only one."""
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    bad_words: Sequence[str | Sequence[int]]
    """Words, or sequences of token ids, that must not appear in the output."""
    min_tokens: int
    seed: int
    """Seed, of 64 bits, of the random numbers by which this request's tokens are drawn; absent = the gateway draws a
    seed and returns it in the usage."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    num_logprobs: int
    """Number of most likely tokens, 0 to 20, whose log-probs are returned at each position along with the log-prob of
    the output token; absent = no log-probs."""
    n: int
    """Number of choices (outputs) for the prompt, 1 to 128."""
    use_beam_search: bool
    """True = beam search with n beams (at least 2) at temperature 0. The choices are the n outputs with the highest
    scores, best first."""
    length_penalty: float
    """Only for a beam search. A choice's score is the sum of its log-probs divided by (its number of tokens) **
    length_penalty. Absent = 1."""
    early_stopping: bool | Literal["never"]
    """When a beam search ends before max_tokens. True = as soon as n choices are finished; "never" = only when no
    better choice is possible; False = when a better choice is unlikely, as in transformers."""
    stop: str | Sequence[str]
    """Stop strings, at most 16: the first that occurs ends the output and is not part of it."""
    structured_outputs: StructuredOutputs
    """The format that the output must have, such as `StructuredOutputs(regex=r"\\d+")`."""
    speculation: Speculation | bool
    """How to speculate. True or absent = the gateway's defaults, False = plain decoding, a `Speculation` = its fields.
    """
    prediction: str
    """A text that the output is expected to equal or resemble, such as a file before an edit. While the output follows
    this text, draft tokens are taken from the text."""
    cache_salt: str
    """A text of 1 to 256 bytes of UTF-8. Only requests with the same salt share cached prefixes."""
    user: str
    """Name of the end user for whom the request is made. The drafter `lookup` copies nothing from other users' outputs,
    and a gateway with prefix_cache_scope `user` does not share cached prefixes between users."""
    priority: int
    """Order among the requests of one caller: a lower number is admitted first; absent = 0."""
    max_tpot_ms: float
    """Milliseconds that each output token should take at most. It is a hint to the scheduler, not a limit; absent = no
    hint."""
    timeout_s: float | None
    """Seconds after which the call fails, retries included; None = no deadline; absent = the client's `timeout_s`."""


KNOWN = frozenset(get_type_hints(GenerateOptions))
"""Names of all keyword arguments of `generate` and `stream`."""
_COUNTS = frozenset({"max_tokens", "top_k", "min_tokens", "seed", "num_logprobs", "n", "priority"})
"""Options that are whole numbers."""
_NUMBERS = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "length_penalty",
        "max_tpot_ms",
        "timeout_s",
    }
)
"""Options that are real numbers."""


def check_types(names: Iterable[str], given: Mapping[str, Any]) -> None:
    """Check the names of keyword arguments, and that numeric options have numbers as values.

    names: all keyword arguments. given: the options whose value is not None. Raises TypeError for an unknown name,
    InvalidRequest for a value of the wrong type.
    """
    unknown = sorted(set(names) - KNOWN)
    if unknown:
        raise TypeError(f"unknown parameter {unknown[0]!r}; known: {', '.join(sorted(KNOWN))}")
    for name, value in given.items():
        if name in _COUNTS and not _is_number(value, Integral):
            raise InvalidRequest(f"{name} is {value!r}, must be a whole number", param=name)
        if name in _NUMBERS and not _is_number(value, Real):
            raise InvalidRequest(f"{name} is {value!r}, must be a number", param=name)
    if not given.get("timeout_s", 1) > 0:
        raise InvalidRequest(f"timeout_s is {given['timeout_s']}, must be greater than 0, or None", param="timeout_s")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
