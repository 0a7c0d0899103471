"""Passes of a pair that is only arithmetic: drafts kept as a list says, rounds that cost what a function says."""

import random
from collections.abc import Callable, Sequence

from outrider.client import Round, RoundTimings, Token, TokenKind
from outrider.lab.tuning.runs import Pass, TimedOutput

MAX_TOKENS = 96
PROMPT_S = 0.05
"""Added to an answer's first round."""
DRAFT_TOKEN_S = 0.002


def verify_s(k: int) -> float:
    """Bent at 6, as real ones are somewhere."""
    return 0.020 + 0.0005 * min(k, 6) + 0.001 * max(k - 6, 0)


def round_s(k: int) -> float:
    return DRAFT_TOKEN_S * k + verify_s(k) + 0.002


def moods(draws: random.Random) -> list[bool]:
    """Whether the draft would be right, token by token: in runs that are easy and runs that are hard."""
    flags: list[bool] = []
    while len(flags) < MAX_TOKENS:
        rate = draws.choice((0.9, 0.35))
        flags += [draws.random() < rate for _ in range(draws.randint(4, 16))]
    return flags[:MAX_TOKENS]


def answer(k: int, right: Sequence[bool], is_late: Callable[[], bool] = lambda: False) -> TimedOutput:
    rounds: list[Round] = []
    gaps_s: list[float] = []
    start = 0
    while start < len(right):
        num_drafted = 0 if is_late() else min(k, MAX_TOKENS - start - 1)
        num_accepted = 0
        while num_accepted < num_drafted and (start + num_accepted >= len(right) or right[start + num_accepted]):
            num_accepted += 1
        all_kept = TokenKind.BONUS if num_drafted else TokenKind.PLAIN
        last = all_kept if num_accepted == num_drafted else TokenKind.RECOVERED
        kinds = [*[TokenKind.ACCEPTED] * num_accepted, last][: len(right) - start]
        rounds.append(_round(kinds, num_drafted, num_accepted))
        gaps_s.append(round_s(num_drafted) + (0.0 if start else PROMPT_S))
        start += len(kinds)
    return TimedOutput(tuple(rounds), tuple(gaps_s))


def one_pass(k: int, texts: Sequence[Sequence[bool]], is_late: Callable[[], bool] = lambda: False) -> Pass:
    return Pass(tuple(answer(k, right, is_late) for right in texts))


def _round(kinds: Sequence[TokenKind], num_drafted: int, num_accepted: int) -> Round:
    wait_s = DRAFT_TOKEN_S * num_drafted
    timings = RoundTimings(
        total_s=round_s(num_drafted), deliver_s=wait_s, verify_s=verify_s(num_drafted), overhead_s=0.001
    )
    tokens = tuple(Token(1, kind, "x") for kind in kinds)
    return Round("r", 0, tokens, "x" * len(kinds), num_drafted, num_accepted, timings)
