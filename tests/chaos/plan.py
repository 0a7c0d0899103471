"""What happens when: drawn from the seed alone, before anything starts, so that a run can be made again."""

import random
from dataclasses import dataclass

PAUSE_BEFORE_S = 20.0
"""Streams run undisturbed for so long first: what is usual is measured then."""
SHORTEST_S, LONGEST_S = 1.0, 20.0
"""Of what lasts: a hang, a cut, a draft that is slow or lies. Some end before they are noticed."""
LONGEST_AWAY_S = 5.0
"""Between a process's end and its start anew."""


@dataclass(frozen=True)
class Planned:
    at_s: float
    """After the first stream."""
    fault: str
    dice: str
    """Seed of what else is drawn: which member, which link."""
    seconds: float
    level: int
    """Streams at once from then on."""


def make_plan(faults: list[str], *, seed: int, minutes: float, every_s: float, fewest: int, most: int) -> list[Planned]:
    """Every kind once, in any order, before one comes again; each about `every_s` after the one before."""
    dice = random.Random(f"{seed}/plan")
    planned: list[Planned] = []
    deck: list[str] = []
    at_s, end_s = PAUSE_BEFORE_S, 60.0 * minutes
    while at_s < end_s:
        if not deck:
            deck = dice.sample(faults, len(faults))
        seconds = dice.uniform(SHORTEST_S, LONGEST_S)
        planned.append(Planned(at_s, deck.pop(), f"{seed}/{len(planned)}", seconds, dice.randint(fewest, most)))
        at_s += every_s * dice.uniform(0.8, 1.2)
    return planned
