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
    """Data that determine the grammar of an output with tool calls or reasoning. Equal data give equal grammars."""

    offer: ToolOffer
    family_name: str | None
    """Name of the CallFamily that says how the model writes calls. None = the output has no calls."""
    reasoning_name: str | None
    """Name of the ReasoningFamily that says how the model writes reasoning. None = the output has no reasoning."""
    in_reasoning: bool
    """Whether the prompt ends inside the reasoning. An output then begins inside it."""
    answer: str
    """Grammar of an answer that is not a call, as JSON that llguidance reads. Empty = any text."""
    token_ids: dict[str, int]
    """Id of each control token among the texts around calls and reasoning, by its text, such as `<tool_call>`."""
    max_reasoning_tokens: int | None = None
    """Maximum number of tokens of reasoning; the grammar then forces the text that ends it. None = any number."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ToolGrammarRequest:
        """Build the request from `fields`, the parsed JSON of a request that orjson serialised."""
        tools = tuple(Tool(**tool) for tool in fields["offer"]["tools"])
        offer = ToolOffer(**fields["offer"] | {"tools": tools})
        return cls(**fields | {"offer": offer})

    @property
    def binds_answer(self) -> bool:
        """Whether the grammar restricts what follows the reasoning. False = any text or call may follow."""
        return binds_answer(self.offer, self.family, self.answer)

    @property
    def family(self) -> CallFamily | None:
        """The CallFamily with the name `family_name`; None if that is None."""
        if self.family_name is None:
            return None
        return BY_PARSER[self.family_name]

    @property
    def reasoning(self) -> ReasoningFamily | None:
        """The ReasoningFamily with the name `reasoning_name`; None if that is None."""
        if self.reasoning_name is None:
            return None
        return REASONING_BY_PARSER[self.reasoning_name]


def binds_answer(offer: ToolOffer, family: CallFamily | None, answer: str) -> bool:
    """Return whether a grammar has to restrict what follows the reasoning. False = any text or call may follow.

    It has to if `offer` requires calls or has a strict tool, or if there is an `answer`, the grammar of an answer that
    is not a call. `family`: how calls are written; None = there are none.
    """
    if family is None or not offer.tools:
        return bool(answer)
    return bool(answer) or offer.choice == "required" or any(tool.strict for tool in offer.tools)


def markers(offer: ToolOffer, family: CallFamily | None, reasoning: ReasoningFamily | None) -> set[str]:
    """Return the fixed texts around calls and reasoning, and the tags in them, such as `<tool_call>`.

    Each of them may be one control token. `offer` gives the tools whose names stand in such texts.
    """
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
