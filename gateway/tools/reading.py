"""How the answers to one chat are read, and what that asks of the grammar. Made once its prompt is written."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.tokenizer import Tokenizer
from gateway.tools.families import MARKER, Family, Marks, family_of, reasoning_marks
from gateway.tools.grammar import grammar_of
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


def reading_of(offer: ToolOffer, tokenizer: Tokenizer, prompt: str, answer: str) -> tuple[Reading | None, str]:
    """Return how answers to this prompt are read, None = as they stand, and their grammar, empty = there is none.

    answer: the grammar of an answer that is no call, empty = any. Takes long for large schemas. Raises InvalidRequest.
    """
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
        return None, answer
    texts = {*(marks or ())}
    if family is not None:
        texts.update(MARKER.findall(" ".join((family.marker or "", *family.texts))))
    shown = (tokenizer.silent_id(text) for text in texts)
    reading = Reading(
        family, offer.names, marks, in_reasoning, offer.max_calls, frozenset(each for each in shown if each is not None)
    )
    return reading, grammar_of(offer, family, marks, in_reasoning, answer, tokenizer.control_id)
