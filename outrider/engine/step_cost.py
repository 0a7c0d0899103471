"""What a step costs on this machine, learnt from the steps themselves, and so how much of a prompt rides beside others.

Owned by the scheduler, fed by the worker after each forward.
"""

from __future__ import annotations

from bisect import bisect_left

SLOWDOWN = 1.5
"""A step that also feeds prompts takes at most about this many times as long as without them."""
MIN_PREFILL_TOKENS = 4
"""Fed in any step whatever it costs, so that prompts never starve. At the end of a long prompt a token may cost many
times what one at its beginning does, so this is small."""
MIN_TOLD_TOKENS = 32
"""Of prompts alone, in a step that tells what a token costs: a smaller one is the reading of the weights."""
PROBE_STEPS = 16
"""After so many steps with prompts, one of that size goes without: what decodes cost grows with their contexts, and
beside prompts it cannot be told from what those cost."""
_WEIGHT = 0.25
"""Of a new measurement in a running mean."""
_PROBE_WEIGHT = 0.5
"""Of one that was long in coming."""
_OUTLIER = 4.0
"""A measurement counts as at most so many times the mean: the machine may have had other things to do."""
_NEAR = 1.25
"""Of two numbers of tokens, at most so many times the other: steps of them take about as long."""
_LEAST_SHARE = 0.1
"""Of a step's mean cost of a token: a prompt token is never thought cheaper, though noise may make two steps equal."""


class StepCost:
    """Running means of decode steps by their size, and of what a prompt token adds to one."""

    def __init__(self) -> None:
        # Sizes are numbers of binary digits of the decode tokens.
        self._decode_s: dict[int, float] = {}
        self._decode_tokens: dict[int, float] = {}  # of the same steps
        self._num_mixed: dict[int, int] = {}  # steps with prompts since one without
        self._token_s: float | None = None  # beside decodes
        self._alone_token_s: float | None = None

    def note(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """A forward of that many tokens took so long."""
        size = num_decode_tokens.bit_length()
        if not num_prefill_tokens:
            weight = _PROBE_WEIGHT if self._num_mixed.get(size, 0) >= PROBE_STEPS else _WEIGHT
            self._decode_s[size] = _mean(self._decode_s.get(size), seconds, weight)
            self._decode_tokens[size] = _mean(self._decode_tokens.get(size), num_decode_tokens, weight)
            self._num_mixed[size] = 0
        elif not num_decode_tokens:
            if num_prefill_tokens >= MIN_TOLD_TOKENS:
                self._alone_token_s = _mean(self._alone_token_s, seconds / num_prefill_tokens)
        elif size in self._decode_s:
            self._num_mixed[size] += 1
            least_s = _LEAST_SHARE * seconds / (num_decode_tokens + num_prefill_tokens)
            added_s = (seconds - self._decode_s[size]) / num_prefill_tokens
            self._token_s = _mean(self._token_s, max(added_s, least_s))

    def wants_probe(self, num_decode_tokens: int) -> bool:
        """What a step of that size costs without prompts is not known, or was measured long ago."""
        if self._alone_token_s is None and self._token_s is None:
            return False  # it would not say how many prompt tokens to feed
        size = num_decode_tokens.bit_length()
        return size not in self._decode_s or self._num_mixed[size] >= PROBE_STEPS

    def joined_saves_s(self, num_decode_tokens: int) -> float:
        """What one step of so many tokens saves over two of half as many: most of a step while weights are what takes
        time, nothing once every token does.
        """
        whole_s, half_s = self._decode_between(num_decode_tokens), self._decode_between(num_decode_tokens / 2)
        if whole_s is None or half_s is None:
            return 0.0
        return min(whole_s, max(0.0, 2 * half_s - whole_s))

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

    def _decode_between(self, num_tokens: float) -> float | None:
        """Seconds of a decode step of so many tokens, on straight lines between the sizes known; None where there is
        none of about so many or more, or of about so many or fewer.
        """
        known = sorted((self._decode_tokens[size], seconds) for size, seconds in self._decode_s.items())
        at = bisect_left(known, (num_tokens, 0.0))
        if 0 < at < len(known):
            (low, low_s), (high, high_s) = known[at - 1 : at + 1]
            return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)
        if not known:
            return None
        nearest, nearest_s = known[min(at, len(known) - 1)]
        is_near = nearest <= _NEAR * num_tokens and num_tokens <= _NEAR * nearest
        return nearest_s if is_near else None


def _mean(before: float | None, new: float, weight: float = _WEIGHT) -> float:
    return new if before is None else before + weight * (min(new, _OUTLIER * before) - before)
