"""How the answers to one chat are read, and what that asks of the grammar. Made once its prompt is written."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gateway.tokenizer import Tokenizer
from gateway.tools.families import MARKER, Family, Marks, family_of, reasoning_marks
from gateway.tools.grammar_request import ToolGrammarRequest, has_grammar, markers
from gateway.tools.offer import ToolOffer
from gateway.tools.reader import Reader
from outrider.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Reading:
    family: Family | None
    """None = there are no calls."""
    names: frozenset[str]
    marks: Marks | None
    """Of reasoning; None = there is none."""
    in_reasoning: bool
    """The prompt began it."""
    max_calls: int | None
    shown_ids: frozenset[int]
    """Special tokens that are a part of the text: the markers."""

    def reader(self) -> Reader:
        """Return the reader of one answer."""
        return Reader(self.family, self.names, self.marks, self.in_reasoning, self.max_calls)


def reading_of(offer: ToolOffer, tokenizer: Tokenizer, prompt: str) -> Reading | None:
    """Return how answers to this prompt are read, None = as they stand. Raises InvalidRequest."""
    template = tokenizer.template
    assert template is not None, "the prompt was written with it"
    if offer.tools and not template.takes_tools:
        raise InvalidRequest(
            "the chat template of this model takes no tools; leave tools out, or start the gateway with "
            "--chat-template FILE, one that does",
            param="tools",
        )
    source = template.tool_source if offer.tools else template.source
    family = family_of(source) if offer.tools else None
    marks = reasoning_marks(source)
    in_reasoning = False
    if marks is not None:
        begin, end = marks
        begun = offer.continued.rfind(begin) > offer.continued.rfind(end)
        in_reasoning = begun or prompt.rstrip().endswith(begin)
        if not in_reasoning and (offer.continued or prompt.rstrip().endswith(end)):
            marks = None  # the prompt is past it
    if family is None and marks is None:
        return None
    texts = {*(marks or ())}
    if family is not None:
        texts.update(MARKER.findall(" ".join((family.marker or "", *family.texts))))
    shown = (tokenizer.silent_id(text) for text in texts)
    shown_ids = frozenset(each for each in shown if each is not None)
    return Reading(family, offer.names, marks, in_reasoning, offer.max_calls, shown_ids)


def grammar_request(offer: ToolOffer, reading: Reading, tokenizer: Tokenizer, answer: str) -> ToolGrammarRequest | None:
    """Return what the grammar of a whole answer is made of, None where it is `answer`.

    answer: the grammar of an answer that is no call, empty = any.
    """
    family, marks = reading.family, reading.marks
    if not has_grammar(offer, family, marks, answer):
        return None
    ids = {text: tokenizer.control_id(text) for text in markers(offer, family, marks)}
    token_ids = {text: token_id for text, token_id in sorted(ids.items()) if token_id is not None}
    # Without what a grammar does not depend on, so that the next turn of a chat makes the same request.
    tools = tuple(dataclasses.replace(tool, description=None) for tool in offer.tools)
    offer = dataclasses.replace(offer, tools=tools, continued="", num_bytes=0)
    return ToolGrammarRequest(offer, family, marks, reading.in_reasoning, answer, token_ids)
