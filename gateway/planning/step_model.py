"""What a step of a target takes, as a function of the slots in it and of the tokens fed to it, learnt from verdicts.
Pure.

Typical times by number of tokens, in classes a quarter octave wide, and between them straight lines: a step is flat
while the weights are what it reads, and steep once it computes. What a slot costs besides its tokens is fitted beside
them (least mean squares).

A running mean for measured times: single outliers move it little, a lasting change moves it soon. Pure.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from math import log2

GAIN = 1 / 32
"""Of a new value, once many are known; the longer values stay on one side, the larger."""
MAX_GAIN = 1 / 4
SPREAD_GAIN = 1 / 16
OUTLIER = 3.0
"""A value counts as at most so many mean deviations away."""


class Typical:
    __slots__ = ("_above", "_run", "_spread", "num_seen", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.num_seen = 0
        self._spread = 0.0
        self._run = 0
        self._above = False

    def observe(self, value: float) -> None:
        self.num_seen += 1
        if self.num_seen == 1:
            self.value, self._spread = value, abs(value) / 4
            return
        off = value - self.value
        above = off > 0.0
        self._run = self._run + 1 if above is self._above else 1
        self._above = above
        gain = max(1.0 / self.num_seen, min(MAX_GAIN, GAIN * self._run))
        limit = OUTLIER * self._spread
        self._spread += SPREAD_GAIN * (min(abs(off), 2.0 * limit + 1e-6) - self._spread)
        self.value += gain * max(-limit, min(limit, off))

    def shift(self, by: float) -> None:
        """What is measured is known to have moved."""
        self.value += by


EXACT = 8
"""Classes of up to so many tokens hold one number of tokens each."""
PER_OCTAVE = 4
CLASSES = [max(1, n) if n <= EXACT else EXACT + int(PER_OCTAVE * log2(n / EXACT)) for n in range(4097)]
SLOT_GAIN = 0.05
SLOT_LEAK = 0.01
"""Of what a slot is held to cost, by each step with one token for each: such steps cannot tell the two apart, and then
it is tokens that cost."""
FORGET_S = 120.0
"""A class that no step was of for so long is not believed any more: the machine may have been slow then."""


class _Class:
    __slots__ = ("is_rough", "num_slots", "num_tokens", "seconds", "seen_s")

    def __init__(self, num_slots: int, num_tokens: int, is_rough: bool) -> None:
        self.num_tokens: float = num_tokens
        self.num_slots: float = num_slots
        self.is_rough = is_rough
        """Only steps with prompts were seen."""
        self.seconds = Typical()
        self.seen_s = 0.0


class StepModel:
    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._known: list[int] = []
        """Keys of `_classes`, in order."""
        self._slot_s = 0.0
        self._needs_no_hints = False
        """Steps without prompts were seen of sizes that differ enough to say what a token costs."""
        self._looked_s = 0.0
        """For what to forget."""

    @property
    def most_tokens(self) -> float:
        """Of the steps that were seen."""
        return self._classes[self._known[-1]].num_tokens if self._known else 0.0

    def note(
        self, num_slots: int, num_tokens: int, seconds: float, with_prompts: bool = False, now: float = 0.0
    ) -> None:
        """A step of so many slots took so long. One that fed pieces of prompts is only a hint of what one with as many
        tokens takes, and too low a one, since most of its tokens are not sampled from: it counts until others say what
        a token costs.
        """
        if now - self._looked_s > FORGET_S / 8:
            self._forget(now)
        if with_prompts and self._needs_no_hints:
            return
        key = class_of(num_tokens)
        known = self._classes.get(key)
        if known is None or (known.is_rough and not with_prompts):
            if known is None:
                insort(self._known, key)
            known = self._classes[key] = _Class(num_slots, num_tokens, with_prompts)
            known.seen_s = now
            known.seconds.observe(seconds)
            self._look_at_hints()
            return
        if with_prompts and not known.is_rough:
            return
        known.seen_s = now
        if num_tokens == num_slots:
            self._slot_s *= 1.0 - SLOT_LEAK
        off = num_slots - known.num_slots
        if off:
            by_tokens_s = self._token_s(key) * (num_tokens - known.num_tokens)
            beyond = seconds - known.seconds.value - self._slot_s * off - by_tokens_s
            limit = 0.25 * known.seconds.value
            self._slot_s += SLOT_GAIN * max(-limit, min(limit, beyond)) * off / (off * off + 1.0)
            self._slot_s = max(0.0, min(self._slot_s, known.seconds.value / max(1.0, known.num_tokens)))
        known.seconds.observe(seconds - self._slot_s * off)
        gain = 1.0 / min(known.seconds.num_seen, 16)
        known.seconds.shift(self._slot_s * gain * off)
        known.num_slots += gain * off
        known.num_tokens += gain * (num_tokens - known.num_tokens)

    def _token_s(self, key: int) -> float:
        """What a token costs besides its slot, about that class: by its neighbours."""
        at = bisect_right(self._known, key)
        low, high = (self._classes[self._known[i]] for i in (max(0, at - 2), min(at, len(self._known) - 1)))
        if high.num_tokens <= low.num_tokens:
            return 0.0
        beyond_s = high.seconds.value - low.seconds.value - self._slot_s * (high.num_slots - low.num_slots)
        return max(0.0, beyond_s / (high.num_tokens - low.num_tokens))

    def _forget(self, now: float) -> None:
        self._looked_s = now
        latest_s = max((known.seen_s for known in self._classes.values()), default=now)
        self._drop([key for key, known in self._classes.items() if latest_s - known.seen_s > FORGET_S])
        self._look_at_hints()

    def _look_at_hints(self) -> None:
        exact = [self._classes[key] for key in self._known if not self._classes[key].is_rough]
        self._needs_no_hints = bool(exact) and _is_below(exact[0], exact[-1])
        if self._needs_no_hints:
            self._drop([key for key, known in self._classes.items() if known.is_rough])

    def _drop(self, keys: list[int]) -> None:
        for key in keys:
            del self._classes[key]
            self._known.remove(key)

    def seconds(self, num_slots: float, num_tokens: float) -> float:
        """Of a step; 0 while nothing is known. Between two that would say less for more tokens, their mean."""
        known = self._known
        if not known:
            return 0.0
        key = int(num_tokens)
        at = bisect_right(known, CLASSES[key] if key < len(CLASSES) else class_of(key))
        low = self._classes[known[at - 1 if at else 0]]
        low_s = self._of(low, num_slots)
        if num_tokens <= low.num_tokens:
            if at < 2:
                return low_s
            high, high_s, low = low, low_s, self._classes[known[at - 2]]
            low_s = self._of(low, num_slots)
        elif at < len(known):
            high = self._classes[known[at]]
            high_s = self._of(high, num_slots)
        else:
            return self._beyond(num_slots, num_tokens, low, low_s)
        if high_s <= low_s:  # noise: the truth is between them
            return 0.5 * (low_s + high_s)
        share = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        return low_s + min(1.0, max(0.0, share)) * (high_s - low_s)

    def _of(self, known: _Class, num_slots: float) -> float:
        """With that many slots in it."""
        seconds = known.seconds.value
        return max(seconds / 4, seconds + self._slot_s * (num_slots - known.num_slots))

    def _beyond(self, num_slots: float, num_tokens: float, last: _Class, last_s: float) -> float:
        """More tokens than were ever seen: on along the line from two thirds of the most, at most in proportion. Flat
        when there is none.
        """
        before = next((c for c in map(self._classes.__getitem__, self._known[-2::-1]) if _is_below(c, last)), None)
        if before is None:
            return last_s
        before_s = self._of(before, num_slots)
        slope = (last_s - before_s) / (last.num_tokens - before.num_tokens)
        return last_s + max(0.0, min(slope, last_s / last.num_tokens)) * (num_tokens - last.num_tokens)


def _is_below(before: _Class, last: _Class) -> bool:
    return 1.5 * before.num_tokens <= last.num_tokens


def class_of(num_tokens: int) -> int:
    """Of about so many."""
    return CLASSES[num_tokens] if num_tokens < len(CLASSES) else EXACT + int(PER_OCTAVE * log2(num_tokens / EXACT))
