"""Long greedy streams, read until something is seen in them: how tests look on while a worker dies and comes back."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.client import AsyncClient, Drafter, Round, RoundStream, Speculation

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n"


def greedy(client: AsyncClient, max_tokens: int, drafter: Drafter | None = None) -> RoundStream:
    wish = Speculation(drafter=drafter)
    return client.stream(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, speculation=wish)


@dataclass
class Seen:
    """What one stream has said, and when."""

    rounds: list[Round] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    async def read(self, stream: RoundStream, enough: Callable[[list[Round]], bool]) -> None:
        """Until `enough` of the rounds read by this call, or the end."""
        first = len(self.rounds)
        async for each in stream:
            self.rounds.append(each)
            self.times_s.append(time.monotonic())
            if enough(self.rounds[first:]):
                return

    @property
    def ids(self) -> list[int]:
        return [token.id for each in self.rounds for token in each.tokens]

    @property
    def phases(self) -> str:
        """One letter for each run of three or more speculative (s) or plain (p) rounds: "sps" is a draft's return."""
        kinds = ["s" if each.num_drafted else "p" for each in self.rounds]
        runs = "".join(kind for kind, *others in zip(kinds, kinds[1:], kinds[2:], strict=False) if {kind} == {*others})
        return "".join(one for one, before in zip(runs, " " + runs, strict=False) if one != before)


async def read_all(seen: Sequence[Seen], streams: Sequence[RoundStream], enough: Callable[[list[Round]], bool]) -> None:
    """Each until `enough` of its rounds, side by side."""
    await asyncio.gather(*(one.read(stream, enough) for one, stream in zip(seen, streams, strict=True)))


def speculative(count: int) -> Callable[[list[Round]], bool]:
    """This many rounds with drafts, the last three in a row."""

    def enough(rounds: list[Round]) -> bool:
        return sum(r.num_drafted > 0 for r in rounds) >= count and all(r.num_drafted for r in rounds[-3:])

    return enough


def plain(count: int) -> Callable[[list[Round]], bool]:
    """This many rounds without drafts at the end."""
    return lambda rounds: len(rounds) >= count and not any(r.num_drafted for r in rounds[-count:])
