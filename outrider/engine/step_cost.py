"""What a step costs on this machine, learnt from the steps themselves, and so how much of a prompt rides beside others.

Owned by the scheduler, fed by the worker after each forward.
"""

from __future__ import annotations

SLOWDOWN = 1.5
"""A step that also feeds prompts takes at most about this many times as long as without them."""
MIN_PREFILL_TOKENS = 16
"""Fed in any step whatever it costs, so that prompts never starve."""
_WEIGHT = 0.25
"""Of a new measurement in a running mean."""
_CHEAPEST_S = 1e-8
"""A prompt token is never thought cheaper: noise may make a difference of two steps vanish."""


class StepCost:
    """Running means of decode steps by their size, and of what a prompt token adds to one."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # by the number of binary digits of the decode tokens
        self._token_s: float | None = None  # beside decodes
        self._alone_token_s: float | None = None

    def note(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """A forward of that many tokens took so long."""
        size = num_decode_tokens.bit_length()
        if not num_prefill_tokens:
            self._decode_s[size] = _mean(self._decode_s.get(size), seconds)
        elif not num_decode_tokens:
            self._alone_token_s = _mean(self._alone_token_s, seconds / num_prefill_tokens)
        elif (alone_s := self._decode(size)) is not None:
            added_s = max((seconds - alone_s) / num_prefill_tokens, _CHEAPEST_S)
            self._token_s = _mean(self._token_s, added_s)

    def prefill_tokens(self, num_decode_tokens: int, most: int) -> int:
        """Prompt tokens for a step with that many decode tokens; `most` when there are none."""
        if not num_decode_tokens:
            return most
        alone_s = self._decode(num_decode_tokens.bit_length())
        token_s = self._alone_token_s if self._token_s is None else self._token_s
        if alone_s is None or token_s is None:
            return min(most, MIN_PREFILL_TOKENS)
        return min(most, max(MIN_PREFILL_TOKENS, int((SLOWDOWN - 1) * alone_s / token_s)))

    def _decode(self, size: int) -> float | None:
        """Seconds of a decode step of about that size; the nearest smaller one known, else the nearest larger."""
        if size in self._decode_s or not self._decode_s:
            return self._decode_s.get(size)
        smaller = [known for known in self._decode_s if known < size]
        return self._decode_s[max(smaller) if smaller else min(self._decode_s)]


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (new - before)
