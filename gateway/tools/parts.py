"""The parts of an output's text: a `CallReader` finds them, the forms of `gateway.api` write them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the output's text that is neither reasoning nor a tool call."""

    text: str
    end: int
    """Number of characters of the output up to and with this piece."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call of the tool `name`. `index`: number of the call in the output, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the arguments of the call with this `index`. All pieces together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallRetraction:
    """The text that began as the call with this `index` is not a call. Its whole text follows as Content."""

    index: int


Part = Content | Reasoning | CallStart | Arguments | CallRetraction
