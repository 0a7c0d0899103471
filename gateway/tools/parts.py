"""The parts of an output's text: a `CallReader` finds them, the forms of `gateway.api` write them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str
    end: int
    """Characters of the output up to the end of this text."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call of the tool `name`. `index`: number of the call in the output."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallRetraction:
    """The call that had begun is none; its whole text follows as content."""

    index: int


Part = Content | Reasoning | CallStart | Arguments | CallRetraction
