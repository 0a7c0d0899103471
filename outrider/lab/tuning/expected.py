"""How fast speculation should be with all that was measured; `theory` says it of one alpha and one cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.client import TokenKind
from outrider.lab.tuning.costs import Cost, Costs
from outrider.lab.tuning.runs import Pass, TimedAnswer


@dataclass(frozen=True)
class Acceptance:
    """Counts what became of the drafts of rounds with one K, or with several."""

    shortest: int
    """The smallest of these K."""
    reached: tuple[int, ...]
    """By position in the proposal: rounds in which all drafts before it were kept, so that it was looked at."""
    accepted: tuple[int, ...]
    """By position: rounds in which it was kept, too."""
    answers: tuple[tuple[TokenKind, ...], ...]
    """Why each token is there, by answer."""

    @classmethod
    def of(cls, passes: Mapping[int, Sequence[Pass]]) -> Acceptance:
        """Count the rounds of the passes, which are by K."""
        most = max(passes)
        reached, accepted = [0] * most, [0] * most
        answers = [answer for own in passes.values() for each in own for answer in each.answers]
        for round_ in (round_ for answer in answers for round_ in answer.rounds):
            num_told = len(round_.tokens)  # fewer than were accepted where the answer ended among them
            for position in range(min(round_.num_accepted + 1, round_.num_drafted, num_told)):
                reached[position] += 1
                accepted[position] += position < round_.num_accepted
        return cls(min(passes), tuple(reached), tuple(accepted), tuple(map(_kinds, answers)))

    @property
    def alpha(self) -> float:
        """Return the drafts kept over those looked at; 0 when nothing was drafted."""
        return sum(self.accepted) / sum(self.reached) if sum(self.reached) else 0.0

    @property
    def by_position(self) -> list[float | None]:
        """Return the same by position; None where no round came that far."""
        return [kept / seen if seen else None for kept, seen in zip(self.accepted, self.reached, strict=True)]

    def chances(self) -> list[list[float]]:
        """Return, by answer and position, the probability that the draft's guess there is kept. [answers][tokens]

        A draft that was kept or replaced says so itself: a rule by token looks at the tokens before it and not at where
        its round began, so that it would have said the same in a round of any K; the rule by block is a little kinder
        to the later ones. What no draft was looked at for has the rate of the others: after a whole proposal that of
        the last position of the shortest, and of those behind it.
        """
        last = slice(max(self.shortest - 1, 0), None)
        num_reached = sum(self.reached[last])
        after_all = sum(self.accepted[last]) / num_reached if num_reached else self.alpha
        of = {
            **dict.fromkeys((TokenKind.ACCEPTED, TokenKind.FORCED, TokenKind.PREDICTED), 1.0),
            TokenKind.RECOVERED: 0.0,
            TokenKind.BONUS: after_all,
            TokenKind.PLAIN: self.alpha,
        }
        return [[of[kind] for kind in kinds] for kinds in self.answers]


def _kinds(answer: TimedAnswer) -> tuple[TokenKind, ...]:
    return tuple(token.kind for round_ in answer.rounds for token in round_.tokens)


def expected_speed(chances: Sequence[Sequence[float]], costs: Costs, k: int, max_tokens: int) -> float:
    """Return the tokens per second of the same answers with k drafts a round."""
    by_k = [costs.by_k[num_drafts] for num_drafts in range(k + 1)]
    return sum(map(len, chances)) / sum(_expected_s(own, by_k, max_tokens) for own in chances)


def _expected_s(chances: Sequence[float], by_k: Sequence[Cost], max_tokens: int) -> float:
    """Go backwards over the positions at which a round may begin, each of which decides all that follows."""
    k = len(by_k) - 1
    num_tokens = len(chances)
    rest_s = [0.0] * (num_tokens + k + 2)  # from each position to the end
    for start in reversed(range(num_tokens)):
        num_drafts = min(k, max_tokens - start - 1)
        cost = by_k[num_drafts]
        drafted_s, reach = 0.0, 1.0
        for at in range(start, start + num_drafts):
            chance = chances[at] if at < num_tokens else 1.0
            drafted_s += reach * (1.0 - chance) * rest_s[at + 1]
            reach *= chance
        drafted_s += reach * rest_s[start + num_drafts + 1]
        plain = cost.plain_share
        after_s = plain * rest_s[start + 1] + (1.0 - plain) * drafted_s
        rest_s[start] = (cost.round_s if start else cost.first_s) + after_s
    return rest_s[0]
