"""The request to a confined process to make the grammar of an output with tools: plain data, sent as JSON.

`reading.py` makes it, `gateway.grammar_checker` sends it, and `gateway.grammar_work` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.tools.call_families import MARKER, NAME, CallFamily, Marks
from gateway.tools.offer import Tool, ToolOffer


@dataclass(frozen=True, slots=True)
class ToolGrammarRequest:
    """All that the grammar of a whole output depends on."""

    offer: ToolOffer
    family: CallFamily | None
    """Family in which calls are written; None = no calls."""
    marks: Marks | None
    """Marks of the reasoning that an output may begin with; None = it has none."""
    in_reasoning: bool
    """Whether the prompt ends inside the reasoning."""
    answer: str
    """Grammar of an answer that is no call; empty = any text."""
    token_ids: dict[str, int]
    """By text, ids of the markers that are one control token."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ToolGrammarRequest:
        """Return the request with these fields, as orjson writes a dataclass."""
        tools = tuple(Tool(**tool) for tool in fields["offer"]["tools"])
        family = fields["family"]
        if family is not None:
            family = CallFamily(**family)
        marks = fields["marks"]
        if marks is not None:
            marks = tuple(marks)
        offer = ToolOffer(**fields["offer"] | {"tools": tools})
        return cls(**fields | {"offer": offer, "family": family, "marks": marks})


def has_grammar(offer: ToolOffer, family: CallFamily | None, marks: Marks | None, answer: str) -> bool:
    """Return whether the output needs another grammar than `answer`, the one of an answer that is no call."""
    if family is None or not offer.tools:
        return bool(answer) and marks is not None
    return bool(answer) or offer.choice == "required" or any(tool.strict for tool in offer.tools)


def markers(offer: ToolOffer, family: CallFamily | None, marks: Marks | None) -> set[str]:
    """Return the texts around calls and reasoning that may each be one token, and their parts that may."""
    texts = [*(marks or ())]
    if family is not None:
        texts += [family.marker or "", family.opening.removeprefix(family.marker or ""), *family.texts]
        texts += [family.head.replace(NAME, tool.name) for tool in offer.tools]
    found = set(texts)
    for text in texts:
        found.update(MARKER.findall(text))
    return found
