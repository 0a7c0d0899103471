"""Measure the time of steps on this machine, and derive how many prompt tokens may run in the same step as decodes. No
torch.

Used by `Scheduler`, on the engine thread.
"""

from __future__ import annotations

from outrider.engine.step_plan import FORWARD_COST_TOKENS

SLOWDOWN = 1.5
"""Maximum duration of a decode step to which prompt tokens are added, as a multiple of its duration without them."""
MIN_PREFILL_TOKENS = 4
"""Minimum number of prompt tokens fed in any step, so that prompts never starve. It is small because a token at the end
of a long prompt may cost many times as much as one at its beginning."""
PROBE_STEPS = 16
"""Number of steps with prompt tokens after which one step with about as many decode tokens runs without prompts. The
cost of decoding grows with the contexts, and cannot be measured while prompts run in the same step."""
_WEIGHT = 0.25
"""Weight of a new measurement in a running mean. A measurement after a long gap has twice this weight."""
_OUTLIER = 4.0
"""Maximum of a measurement, as a multiple of the mean, since the machine may have been busy with something else."""
_MIN_FRACTION = 0.1
"""Minimum cost of a prompt token, as a fraction of the step's mean cost per token. It applies if noise makes the
measured difference zero or less."""


class StepCost:
    """Running means of two times: the duration of decode steps, by their number of decode tokens, and the time that one
    prompt token adds to a step.
    """

    def __init__(self) -> None:
        # A size is the bit length of the number of decode tokens.
        self._decode_s: dict[int, float] = {}
        self._num_mixed: dict[int, int] = {}  # steps with prompts since the last one without
        self._token_s: float | None = None  # of a prompt token beside decodes
        self._alone_token_s: float | None = None

    def note(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """Record that a forward with these numbers of decode and prefill tokens took `seconds`."""
        size = num_decode_tokens.bit_length()
        if not num_prefill_tokens:
            weight = _WEIGHT
            if self._num_mixed.get(size, 0) >= PROBE_STEPS:
                weight = 2 * _WEIGHT
            self._decode_s[size] = _mean(self._decode_s.get(size), seconds, weight)
            self._num_mixed[size] = 0
        elif not num_decode_tokens:
            if num_prefill_tokens >= FORWARD_COST_TOKENS:  # a smaller step is the reading of the weights
                self._alone_token_s = _mean(self._alone_token_s, seconds / num_prefill_tokens)
        elif size in self._decode_s:
            self._num_mixed[size] += 1
            min_s = _MIN_FRACTION * seconds / (num_decode_tokens + num_prefill_tokens)
            added_s = (seconds - self._decode_s[size]) / num_prefill_tokens
            self._token_s = _mean(self._token_s, max(added_s, min_s))

    def needs_probe(self, num_decode_tokens: int) -> bool:
        """Return whether the next step should run without prompt tokens, to measure how long decoding about this many
        tokens takes. That is so if it was never measured, or if the last `PROBE_STEPS` steps with about as many decode
        tokens all had prompt tokens, too. It is never so before a step with prompt tokens was measured.
        """
        if self._alone_token_s is None and self._token_s is None:
            return False  # no prompt token has been measured yet: a probe would not give a budget
        size = num_decode_tokens.bit_length()
        return size not in self._decode_s or self._num_mixed[size] >= PROBE_STEPS

    def prefill_tokens(self, num_decode_tokens: int, max_tokens: int) -> int:
        """Return the number of prompt tokens that a step with `num_decode_tokens` decode tokens may have, at most
        `max_tokens`. They prolong the step to at most `SLOWDOWN` times its duration without them, except that
        `MIN_PREFILL_TOKENS` are always allowed.

        Returns `max_tokens` if there are no decode tokens, or if nothing was measured yet.
        """
        if not num_decode_tokens:
            return max_tokens
        step_s = self._decode_step_s(num_decode_tokens.bit_length())
        token_s = self._token_s
        if token_s is None:
            token_s = self._alone_token_s
        if step_s is None or token_s is None:
            return max_tokens  # nothing has run yet: the cost of a decode step is unknown
        # a step of 40 ms, 0.5 ms a token: 20 ms more are 40 tokens
        return min(max_tokens, max(MIN_PREFILL_TOKENS, int((SLOWDOWN - 1) * step_s / token_s)))

    def _decode_step_s(self, size: int) -> float | None:
        if size in self._decode_s or not self._decode_s:
            return self._decode_s.get(size)
        smaller = [known for known in self._decode_s if known < size]
        if not smaller:
            return self._decode_s[min(self._decode_s)]
        return self._decode_s[max(smaller)]


def _mean(previous: float | None, new: float, weight: float = _WEIGHT) -> float:
    if previous is None:
        return new
    return previous + weight * (min(new, _OUTLIER * previous) - previous)
