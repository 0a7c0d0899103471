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
    """Keyword arguments of `generate` and `stream`. An absent one takes the default of `SamplingParams`."""

    prompt_ids: Sequence[int]
    """Token ids in place of a text."""
    messages: Sequence[Message]
    """A chat in place of a text; the gateway applies the model's chat template."""
    model: str
    """Id of a served model; absent = the only one."""
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
    """64 bits; absent = the gateway draws one and reports it in the usage."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    num_logprobs: int
    """Return the log-probs of each token and of this many most likely ones, 0 to 20; absent = none."""
    n: int
    """Choices for the prompt, 1 to 128."""
    use_beam_search: bool
    """Search n beams, at least 2, at temperature 0: the choices are those with the highest scores, best first."""
    length_penalty: float
    """For a beam search: a choice's score is its sum of log-probs over length ** length_penalty. Absent = 1."""
    early_stopping: bool | Literal["never"]
    """For a beam search: True ends it with n finished choices, "never" only where none can become better."""
    stop: str | Sequence[str]
    """Strings that end the output and are not part of it; at most 16."""
    structured_outputs: StructuredOutputs
    """The form that the output must have, such as `StructuredOutputs(regex=r"\\d+")`."""
    speculation: Speculation | bool
    """False = plain decoding."""
    prediction: str
    """A text that the output may equal or resemble, such as a file before an edit. It is drafted from as far as the
    output follows it."""
    cache_salt: str
    """Cached prefixes are shared only between requests of the same salt; 1 to 256 bytes of UTF-8."""
    user: str
    """The end user on whose behalf the request is made: `lookup` copies nothing from another user's outputs, and a
    gateway with prefix_cache_scope `user` shares no cached prefix with another user."""
    priority: int
    """Among a caller's requests those with a lower number are admitted first; absent = 0."""
    max_tpot_ms: float
    """Milliseconds that an output token should take at most, as a hint to the scheduler; absent = no aim."""
    timeout_s: float | None
    """Deadline of the call in seconds, retries included; None = none; absent = the client's."""


KNOWN = frozenset(get_type_hints(GenerateOptions))
"""Names of all options."""
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
    """Check that all names are options, and that those given (not None) which are numbers are numbers.

    Raises TypeError for an unknown name, InvalidRequest for a value.
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
