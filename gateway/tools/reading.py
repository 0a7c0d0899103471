"""How the outputs of one chat are read for calls and reasoning, and which grammar that needs.

`gateway.admission.requests` calls both functions, when the prompt of the chat is rendered.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gateway.tokenizer import Tokenizer
from gateway.tools.call_families import MARKER, CallFamily, Marks, family_of, reasoning_marks
from gateway.tools.grammar_request import ToolGrammarRequest, has_grammar, markers
from gateway.tools.offer import ToolOffer
from gateway.tools.reader import CallReader
from outrider.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of a prompt are read."""

    family: CallFamily | None
    """Family in which calls are written; None = there are no calls."""
    names: frozenset[str]
    """Names of the tools that may be called."""
    marks: Marks | None
    """Marks of the reasoning; None = there is none."""
    in_reasoning: bool
    """Whether the prompt ends inside the reasoning."""
    max_calls: int | None
    """Calls that an output may have; None = any number."""
    shown_ids: frozenset[int]
    """Special tokens that are part of the text: the markers of calls and reasoning."""

    def reader(self) -> CallReader:
        """Return a reader for one output."""
        return CallReader(self.family, self.names, self.marks, self.in_reasoning, self.max_calls)


def reading_of(offer: ToolOffer, tokenizer: Tokenizer, prompt: str) -> Reading | None:
    """Return how the outputs of a chat are read; None = they are text alone.

    `prompt`: the rendered chat. Raises InvalidRequest for tools that the chat template cannot take.
    """
    template = tokenizer.template
    assert template is not None, "the prompt was written with it"
    if offer.tools and not template.takes_tools:
        raise InvalidRequest(
            "the chat template of this model takes no tools; leave tools out, or start the gateway with "
            "--chat-template FILE, one that does",
            param="tools",
        )
    family = None
    source = template.source
    if offer.tools:
        source = template.tool_source
        family = family_of(source)
    marks = reasoning_marks(source)
    in_reasoning = False
    if marks is not None:
        in_reasoning = _ends_in_reasoning(offer, prompt, marks)
        if not in_reasoning and _is_past_reasoning(offer, prompt, marks):
            marks = None
    if family is None and marks is None:
        return None
    return Reading(family, offer.names, marks, in_reasoning, offer.max_calls, _marker_ids(family, marks, tokenizer))


def _ends_in_reasoning(offer: ToolOffer, prompt: str, marks: Marks) -> bool:
    begin, end = marks
    is_continued = offer.continued_text.rfind(begin) > offer.continued_text.rfind(end)
    return is_continued or prompt.rstrip().endswith(begin)


def _is_past_reasoning(offer: ToolOffer, prompt: str, marks: Marks) -> bool:
    return bool(offer.continued_text) or prompt.rstrip().endswith(marks[1])


def _marker_ids(family: CallFamily | None, marks: Marks | None, tokenizer: Tokenizer) -> frozenset[int]:
    texts = {*(marks or ())}
    if family is not None:
        texts.update(MARKER.findall(" ".join((family.marker or "", *family.texts))))
    ids = set[int]()
    for text in texts:
        token_id = tokenizer.silent_id(text)
        if token_id is not None:
            ids.add(token_id)
    return frozenset(ids)


def grammar_request(offer: ToolOffer, reading: Reading, tokenizer: Tokenizer, answer: str) -> ToolGrammarRequest | None:
    """Return the request for the grammar of a whole output; None if that grammar is `answer`.

    `answer`: the grammar of an answer that is no call; empty = any text.
    """
    family = reading.family
    marks = reading.marks
    if not has_grammar(offer, family, marks, answer):
        return None
    token_ids = {}
    for text in sorted(markers(offer, family, marks)):
        token_id = tokenizer.control_id(text)
        if token_id is not None:
            token_ids[text] = token_id
    # Only what the grammar depends on: the next request of the same chat then needs the same grammar.
    tools = tuple(dataclasses.replace(tool, description=None) for tool in offer.tools)
    offer = dataclasses.replace(offer, tools=tools, continued_text="", num_bytes=0)
    return ToolGrammarRequest(offer, family, marks, reading.in_reasoning, answer, token_ids)
