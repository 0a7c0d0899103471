"""What a step costs on this machine, learnt from the steps themselves, and so how much of a prompt rides beside others.

Owned by the scheduler, fed by the worker after each forward.
"""

from __future__ import annotations

SLOWDOWN = 1.5
"""A step that also feeds prompts takes at most about this many times as long as without them."""
MIN_PREFILL_TOKENS = 4
"""Fed in any step whatever it costs, so that prompts never starve. At the end of a long prompt a token may cost many
times what one at its beginning does, so this is small."""
MIN_TOLD_TOKENS = 32
"""Of prompts alone, in a step that tells what a token costs: a smaller one is the reading of the weights."""
_WEIGHT = 0.25
"""Of a new measurement in a running mean."""
_OUTLIER = 4.0
"""A measurement counts as at most so many times the mean: the machine may have had other things to do."""
_LEAST_SHARE = 0.1
"""Of a step's mean cost of a token: a prompt token is never thought cheaper, though noise may make two steps equal."""
_LEAST_DECODE_SHARE = 0.02
"""Of a mixed step that its decodes are thought to take, while no step without prompts has been seen."""


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
            if num_prefill_tokens < MIN_TOLD_TOKENS:
                return
            self._alone_token_s = _mean(self._alone_token_s, seconds / num_prefill_tokens)
        elif size in self._decode_s:
            least_s = _LEAST_SHARE * seconds / (num_decode_tokens + num_prefill_tokens)
            added_s = (seconds - self._decode_s[size]) / num_prefill_tokens
            self._token_s = _mean(self._token_s, max(added_s, least_s))
        elif self._alone_token_s is not None:
            rest_s = seconds - num_prefill_tokens * self._alone_token_s
            self._decode_s[size] = max(rest_s, _LEAST_DECODE_SHARE * seconds)

    def prefill_tokens(self, num_decode_tokens: int, most: int) -> int:
        """Prompt tokens for a step with that many decode tokens; `most` when there are none."""
        if not num_decode_tokens:
            return most
        alone_s = self._decode(num_decode_tokens.bit_length())
        token_s = self._alone_token_s if self._token_s is None else self._token_s
        if alone_s is None or token_s is None:
            return most  # nothing has run yet: what is to be spared is not known
        return min(most, max(MIN_PREFILL_TOKENS, int((SLOWDOWN - 1) * alone_s / token_s)))

    def _decode(self, size: int) -> float | None:
        """Seconds of a decode step of about that size; the nearest smaller one known, else the nearest larger."""
        if size in self._decode_s or not self._decode_s:
            return self._decode_s.get(size)
        smaller = [known for known in self._decode_s if known < size]
        return self._decode_s[max(smaller) if smaller else min(self._decode_s)]


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (min(new, _OUTLIER * before) - before)
