"""What a process is given to make the grammar of an answer with tools: plain data, so that it travels as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.tools.families import MARKER, NAME, Family, Marks
from gateway.tools.offer import Tool, ToolOffer


@dataclass(frozen=True, slots=True)
class ToolGrammarRequest:
    offer: ToolOffer
    family: Family | None
    """None = no calls."""
    marks: Marks | None
    """Of the reasoning that may come before all else; None = there is none."""
    in_reasoning: bool
    """The prompt began it."""
    answer: str
    """The grammar of an answer that is no call; empty = any."""
    token_ids: dict[str, int]
    """Ids of the markers that are one token and no text to a grammar."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ToolGrammarRequest:
        """Return the request whose fields, as JSON, these are."""
        offer = fields["offer"]
        tools = tuple(Tool(**tool) for tool in offer["tools"])
        family, marks = fields["family"], fields["marks"]
        return cls(
            **fields
            | {
                "offer": ToolOffer(**offer | {"tools": tools}),
                "family": None if family is None else Family(**family),
                "marks": None if marks is None else tuple(marks),
            }
        )


def has_grammar(offer: ToolOffer, family: Family | None, marks: Marks | None, answer: str) -> bool:
    """Return whether an answer to this offer is held to another grammar than `answer`."""
    if family is None or not offer.tools:
        return bool(answer) and marks is not None
    return bool(answer) or offer.choice == "required" or any(tool.strict for tool in offer.tools)


def markers(offer: ToolOffer, family: Family | None, marks: Marks | None) -> set[str]:
    """Return all that may be one token in the texts around calls and reasoning."""
    texts = [*(marks or ())]
    if family is not None:
        texts += [family.marker or "", family.opening.removeprefix(family.marker or ""), *family.texts]
        texts += [family.head.replace(NAME, tool.name) for tool in offer.tools]
    return {found for text in texts for found in (text, *MARKER.findall(text))}
