"""The request to a confined process to make the grammar of an output with tools: plain data, sent as JSON.

`reading.py` makes it, `gateway.grammar_checker` sends it, and `gateway.grammar_work` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.tools.call_families import BY_PARSER, CallFamily
from gateway.tools.cursor import MARKER
from gateway.tools.forms.form import NAME
from gateway.tools.offer import Tool, ToolOffer
from gateway.tools.reasoning import REASONING_BY_PARSER, ReasoningFamily


@dataclass(frozen=True, slots=True)
class ToolGrammarRequest:
    """What the grammar of an output with tool calls is compiled from. Equal requests give the same grammar."""

    offer: ToolOffer
    family_name: str | None
    """CallFamily in which calls are written; None = no calls."""
    reasoning_name: str | None
    """ReasoningFamily of the reasoning that an output may begin with; None = it has none."""
    in_reasoning: bool
    """Whether the prompt ends inside the reasoning."""
    answer: str
    """Grammar of an answer that is no call; empty = any text."""
    token_ids: dict[str, int]
    """Ids of the markers of calls and reasoning that are one control token, by the text of the marker."""
    max_reasoning_tokens: int | None = None
    """Tokens of reasoning after which its end is forced; None = any number."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ToolGrammarRequest:
        """Return the request with these fields, as orjson writes a dataclass."""
        tools = tuple(Tool(**tool) for tool in fields["offer"]["tools"])
        offer = ToolOffer(**fields["offer"] | {"tools": tools})
        return cls(**fields | {"offer": offer})

    @property
    def binds_answer(self) -> bool:
        """Whether what follows the reasoning is bound: to calls, to the schemas of calls or to `answer`."""
        return binds_answer(self.offer, self.family, self.answer)

    @property
    def family(self) -> CallFamily | None:
        """The family of that name."""
        if self.family_name is None:
            return None
        return BY_PARSER[self.family_name]

    @property
    def reasoning(self) -> ReasoningFamily | None:
        """The family of reasoning of that name."""
        if self.reasoning_name is None:
            return None
        return REASONING_BY_PARSER[self.reasoning_name]


def binds_answer(offer: ToolOffer, family: CallFamily | None, answer: str) -> bool:
    """Return whether an output without its reasoning is bound to calls, to the schemas of calls or to `answer`."""
    if family is None or not offer.tools:
        return bool(answer)
    return bool(answer) or offer.choice == "required" or any(tool.strict for tool in offer.tools)


def markers(offer: ToolOffer, family: CallFamily | None, reasoning: ReasoningFamily | None) -> set[str]:
    """Return the texts around calls and reasoning that may each be one token, and their parts that may."""
    texts = list[str]()
    if reasoning is not None:
        texts += [*reasoning.marks, reasoning.answer_start, reasoning.turn]
    if family is not None:
        texts += [*family.texts, family.opening.removeprefix(family.marker or "")]
        for text in family.form.texts:
            texts += [text.replace(NAME, tool.name) for tool in offer.tools if NAME in text]
    found = set(texts)
    for text in texts:
        found.update(MARKER.findall(text))
    return found
