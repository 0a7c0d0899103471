"""Slots that were just answered come back within a gateway's round trip, or as soon as their next proposal is made: one
step can serve them all again.

Without a little patience the first to come back has a step of its own, the others find it under way and are served by
the next: from then on there are two half-full steps where one full one would cost hardly more, and a prompt's piece
slips in where all would have been ready a moment later. On the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.engine.worker.jobs import SlotKey

PATIENCE = 0.5
"""Of a step's time: how long the next one is held back at most for plain slots. What it saves is a step for those who
come later, which takes about as long as one for all."""
DRAFT_PATIENCE = 0.8
"""Of what one step for all saves over two of half as many: the same for slots whose next tokens are being drafted.
Where every token takes its time a second step costs nothing, and drafts are best made while the others' step runs."""
WORTH = 0.75
"""Of that: who usually takes longer is not waited for, since what is waited in vain is lost."""
STRAGGLER = 3.0
"""Nobody is waited for longer than so many times what such a round usually takes it."""
_WEIGHT = 0.1
"""Of a new measurement in the running mean,"""
_DRAFT_WEIGHT = 0.25
"""and in a slot's own."""


@dataclass(slots=True)
class _Answered:
    """A slot whose next verify is not ready yet."""

    since_s: float
    with_drafts: bool


class Returning:
    """Who is waited for: not who takes too long for that to pay, through a gateway or a draft too far away.

    `ready_s(key)` is when the slot's next verify became ready, or None as long as it is not.
    """

    def __init__(self, ready_s: Callable[[SlotKey], float | None]) -> None:
        self._ready_s = ready_s
        self._answered: dict[SlotKey, _Answered] = {}
        self._awaited: dict[SlotKey, float] = {}  # of the last step: until when
        self._limit_s = self._draft_limit_s = 0.0
        self._usual_s = 0.0  # of plain slots: from an answer until the next verify is ready
        self._draft_usual_s = 0.0  # of all that draft
        self._own_usual_s: dict[SlotKey, float] = {}  # of each of these

    def answered(
        self,
        plain: Iterable[SlotKey],
        drafting: Iterable[SlotKey],
        now: float,
        step_s: float | None,
        joined_saves_s: float,
    ) -> None:
        """A step's verdicts are on their way; these slots will go on, plain or with proposals as in this round.

        step_s: what it took; None for a step that also fed prompts, which says nothing of the next one.
        joined_saves_s: what a step like it saves over two of half the tokens.
        """
        if step_s is not None:
            self._limit_s = PATIENCE * step_s
            self._draft_limit_s = DRAFT_PATIENCE * min(step_s, joined_saves_s)
        self._awaited.clear()
        for keys, with_drafts in ((plain, False), (drafting, True)):
            for key in keys:
                self._answered[key] = _Answered(now, with_drafts)
                self._await(key)

    def arrived(self, key: SlotKey, with_drafts: bool, due_s: float) -> None:
        """Its next verify is here, ready or not; due_s: when it goes without its drafts."""
        answered = self._answered.get(key)
        if answered is None:
            return
        answered.with_drafts = with_drafts
        if self._awaited.pop(key, None) is not None:
            self._await(key)
            if key in self._awaited:
                self._awaited[key] = min(self._awaited[key], due_s)

    def late(self, key: SlotKey) -> None:
        """Its proposal was not there when its time was up."""
        self._drafted(key, 2 * self._draft_limit_s)

    def gone(self, key: SlotKey) -> None:
        self._awaited.pop(key, None)
        self._answered.pop(key, None)
        self._own_usual_s.pop(key, None)

    def owner_gone(self, owner: int) -> None:
        for key in [key for key in {*self._answered, *self._own_usual_s} if key[0] == owner]:
            self.gone(key)

    def wait_until(self, now: float) -> float | None:
        """Until when the next step is to be held back; None when it is not."""
        for key in list(self._answered):
            ready_s = self._ready_s(key)
            if ready_s is not None:
                self._back(key, ready_s)
        return max((until for until in self._awaited.values() if now < until), default=None)

    def _await(self, key: SlotKey) -> None:
        """Unless it takes too long."""
        answered = self._answered[key]
        if not answered.with_drafts:
            if self._usual_s <= self._limit_s:
                self._awaited[key] = answered.since_s + self._limit_s
            return
        usual_s = self._own_usual_s.get(key, self._draft_usual_s)
        if usual_s <= WORTH * self._draft_limit_s:
            straggler_s = STRAGGLER * usual_s if usual_s else self._draft_limit_s
            self._awaited[key] = answered.since_s + min(self._draft_limit_s, straggler_s)

    def _back(self, key: SlotKey, ready_s: float) -> None:
        """Perhaps beside a later step."""
        self._awaited.pop(key, None)
        answered = self._answered.pop(key)
        took_s = max(0.0, ready_s - answered.since_s)
        if answered.with_drafts:
            self._drafted(key, min(took_s, 2 * self._draft_limit_s))
        else:
            self._usual_s += _WEIGHT * (min(took_s, 2 * self._limit_s) - self._usual_s)

    def _drafted(self, key: SlotKey, took_s: float) -> None:
        if not self._draft_limit_s:  # nobody is waited for, whatever it takes
            return
        self._draft_usual_s += _WEIGHT * (took_s - self._draft_usual_s)
        before_s = self._own_usual_s.get(key, self._draft_usual_s)
        self._own_usual_s[key] = before_s + _DRAFT_WEIGHT * (took_s - before_s)
